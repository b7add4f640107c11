//! A verb's arguments, one behind the other in one piece of memory: a call has some forty of them.

use data_encoding::HEXLOWER;
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
    pub(super) fn put(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.text);
        self.ends.push(self.text.len());
    }

    /// The same, where writing it may fail.
    pub(super) fn try_put<E>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<(), E> {
        write(&mut self.text)?;
        self.ends.push(self.text.len());
        Ok(())
    }

    pub(super) fn number(&mut self, number: impl itoa::Integer) {
        self.put(|out| put_number(out, number));
    }

    /// Nothing, where there is none.
    pub(super) fn number_if(&mut self, number: Option<impl itoa::Integer>) {
        match number {
            Some(number) => self.number(number),
            None => self.push(b""),
        }
    }

    /// In hexadecimal.
    pub(super) fn hex(&mut self, bytes: &[u8]) {
        self.put(|out| put_hex(out, bytes));
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

/// Its decimal digits.
pub(super) fn put_number(out: &mut Vec<u8>, number: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Two hexadecimal digits for each byte.
pub(super) fn put_hex(out: &mut Vec<u8>, bytes: &[u8]) {
    let from = out.len();
    out.resize(from + HEXLOWER.encode_len(bytes.len()), b'0');
    if let Some(room) = out.get_mut(from..) {
        HEXLOWER.encode_mut(bytes, room);
    }
}

#[cfg(test)]
mod tests {
    use redis::Arg;

    use super::Words;

    #[test]
    fn words_come_out_as_they_went_in() {
        let mut words = Words::of(&[b"one".to_vec(), vec![]]);
        words.number(-12);
        words.number_if(None::<u64>);
        words.number_if(Some(i64::MIN));
        words.hex(&[0, 171, 255]);
        let written = words.try_put(|out| {
            out.extend([0, 255]);
            Ok::<(), ()>(())
        });
        written.unwrap();
        let mut cmd = words.room();
        words.add_to(&mut cmd);
        let args: Vec<_> = cmd.args_iter().collect();
        let expected: [&[u8]; 7] = [b"one", b"", b"-12", b"", b"-9223372036854775808", b"00abff", &[0, 255]];
        assert!(args.iter().zip(expected).all(|(arg, word)| matches!(arg, Arg::Simple(arg) if *arg == word)));
        assert_eq!(args.len(), expected.len());
    }
}
