//! A verb's arguments, one behind the other in one piece of memory: a call has some forty of them.

use std::fmt::{Display, Write as _};

use redis::Cmd;

/// What is in front of a verb's arguments, and as much again per argument for what the protocol says about each.
const HEAD_WORDS: usize = 4;
const HEAD_BYTES: usize = 128;

#[derive(Debug, Default)]
pub(super) struct Words {
    text: Vec<u8>,
    /// Where each ends.
    ends: Vec<usize>,
}

/// Where `write!` puts a word.
struct Tail<'a>(&'a mut Vec<u8>);

impl std::fmt::Write for Tail<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

impl Words {
    pub(super) fn with_capacity(words: usize, bytes: usize) -> Self {
        Self { text: Vec::with_capacity(bytes), ends: Vec::with_capacity(words) }
    }

    pub(super) fn of(args: &[Vec<u8>]) -> Self {
        let mut words = Self::with_capacity(args.len(), args.iter().map(Vec::len).sum());
        args.iter().for_each(|arg| words.push(arg));
        words
    }

    pub(super) fn push(&mut self, word: &[u8]) {
        self.text.extend_from_slice(word);
        self.ends.push(self.text.len());
    }

    /// A word that somebody else writes to the end of the text.
    pub(super) fn push_with<E>(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        write(&mut self.text)?;
        self.ends.push(self.text.len());
        Ok(())
    }

    pub(super) fn show(&mut self, word: impl Display) {
        let _infallible = write!(Tail(&mut self.text), "{word}");
        self.ends.push(self.text.len());
    }

    /// Nothing, where there is none.
    pub(super) fn show_some(&mut self, word: Option<impl Display>) {
        match word {
            Some(word) => self.show(word),
            None => self.push(b""),
        }
    }

    /// An empty command with room for these and what is in front of them.
    pub(super) fn room(&self) -> Cmd {
        Cmd::with_capacity(self.ends.len() + HEAD_WORDS, self.text.len() + HEAD_BYTES)
    }

    pub(super) fn add_to(&self, cmd: &mut Cmd) {
        let mut from = 0;
        for end in &self.ends {
            cmd.arg(self.text.get(from..*end).unwrap_or_default());
            from = *end;
        }
    }
}

#[cfg(test)]
mod tests {
    use redis::Arg;

    use super::Words;

    #[test]
    fn words_come_out_as_they_went_in() {
        let mut words = Words::of(&[b"one".to_vec(), vec![]]);
        words.show(-12);
        words.show_some(None::<u64>);
        words.show_some(Some("x y"));
        let written = words.push_with(|out| {
            out.extend([0, 255]);
            Ok::<(), ()>(())
        });
        written.unwrap();
        let mut cmd = words.room();
        words.add_to(&mut cmd);
        let args: Vec<_> = cmd.args_iter().collect();
        let expected: [&[u8]; 6] = [b"one", b"", b"-12", b"", b"x y", &[0, 255]];
        assert!(args.iter().zip(expected).all(|(arg, word)| matches!(arg, Arg::Simple(arg) if *arg == word)));
        assert_eq!(args.len(), expected.len());
    }
}
