//! Names and words as numbers: rows that have them in common stay small, and so does the queue of rows that wait.
//!
//! A number is of this process alone. What a database calls the same word is asked of it once; words are names from
//! configs and from our own enums, so their number is bounded by the configs that were ever used.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::{Place, RecordError, Records, locked};

/// A word, as this process numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Word(usize);

/// All words that were met so far.
#[derive(Debug, Default)]
pub struct Words {
    numbers: HashMap<Box<str>, Word, RandomState>,
    texts: Vec<Box<str>>,
    /// What the database calls them, once it was asked.
    ids: Vec<Option<i64>>,
    /// Those of our own enums that were met, by where they stand in memory: those that nearly every record has come first.
    ours: Vec<(&'static str, Word)>,
}

impl Words {
    /// The number of a word.
    pub fn number(&mut self, text: &str) -> Word {
        if let Some(word) = self.numbers.get(text) {
            return *word;
        }
        let word = Word(self.texts.len());
        self.numbers.insert(text.into(), word);
        self.texts.push(text.into());
        self.ids.push(None);
        word
    }

    /// The number of a word of our own, without a look at its letters.
    pub(super) fn ours(&mut self, text: &'static str) -> Word {
        let known = self.ours.iter().find(|(known, _)| std::ptr::eq(*known, text));
        if let Some((_, word)) = known {
            return *word;
        }
        let word = self.number(text);
        self.ours.push((text, word));
        word
    }

    /// The word of a number.
    pub(super) fn text(&self, word: Word) -> &str {
        self.texts.get(word.0).map_or("", AsRef::as_ref)
    }

    /// What the database calls a word; 0, which it calls none, where it was not asked.
    pub(super) fn id(&self, word: Word) -> i64 {
        self.ids.get(word.0).copied().flatten().unwrap_or_default()
    }

    fn unknown(&self) -> Vec<&str> {
        let all = self.texts.iter().zip(&self.ids);
        all.filter(|(_, id)| id.is_none()).map(|(text, _)| text.as_ref()).collect()
    }

    fn learn(&mut self, known: Vec<(i64, String)>) {
        for (id, text) in known {
            if let Some(slot) = self.numbers.get(text.as_str()).and_then(|word| self.ids.get_mut(word.0)) {
                *slot = Some(id);
            }
        }
    }
}

impl Records {
    /// Learns what the database calls every word, and tells it those that it does not know.
    pub(super) fn introduce(&self, words: &mut Words) -> Result<(), RecordError> {
        let unknown = words.unknown();
        if unknown.is_empty() {
            return Ok(());
        }
        let known = match &self.0 {
            Place::File(connection) => {
                let mut connection = locked(connection);
                let transaction = connection.transaction()?;
                let mut known = vec![];
                for text in unknown {
                    transaction.execute("INSERT OR IGNORE INTO record_word (text) VALUES (?1)", [text])?;
                    let id = "SELECT id FROM record_word WHERE text = ?1";
                    known.push((transaction.query_row(id, [text], |row| row.get(0))?, text.to_owned()));
                }
                transaction.commit()?;
                known
            }
            Place::Fleet(ledger) => {
                ledger.within(async |t| {
                    // In an order, so that two nodes with the same new words wait for each other and do not embrace.
                    let insert = "INSERT INTO record_word (text)
                                  SELECT DISTINCT u.text FROM unnest($1::text[]) AS u (text) ORDER BY 1
                                  ON CONFLICT DO NOTHING";
                    t.execute(insert, &[&unknown]).await?;
                    let known = "SELECT id, text FROM record_word WHERE text = ANY ($1)";
                    let rows = t.query(known, &[&unknown]).await?;
                    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
                })?
            }
        };
        words.learn(known);
        Ok(())
    }

    /// Every word, by what the database calls it.
    pub(super) fn all_words(&self) -> Result<HashMap<i64, String>, RecordError> {
        let all = "SELECT id, text FROM record_word";
        match &self.0 {
            Place::File(connection) => {
                let connection = locked(connection);
                let mut query = connection.prepare_cached(all)?;
                let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
                Ok(rows.collect::<Result<_, _>>()?)
            }
            Place::Fleet(ledger) => {
                let rows = ledger.within(async |t| Ok(t.query(all, &[]).await?))?;
                let word = |row: &tokio_postgres::Row| Ok((row.try_get(0)?, row.try_get(1)?));
                Ok(rows.iter().map(word).collect::<Result<_, crate::ledger::LedgerError>>()?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_its_number_and_the_database_keeps_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        let (mut one, mut other) = (Words::default(), Words::default());
        let (connect, idle) = (one.number("connect"), one.number("idle"));
        assert_eq!((one.number("connect"), one.id(connect)), (connect, 0));
        assert_eq!([one.ours("idle"), one.ours("idle"), one.number("idle")], [idle; 3]);
        records.introduce(&mut one).unwrap();
        let twin = other.number("idle");
        records.introduce(&mut other).unwrap();
        assert_eq!(one.id(idle), other.id(twin));
        assert_ne!(one.id(idle), one.id(connect));
        let all = records.all_words().unwrap();
        assert_eq!(all.get(&one.id(idle)).map(String::as_str), Some("idle"));
        assert_eq!(all.len(), 2);
    }
}
