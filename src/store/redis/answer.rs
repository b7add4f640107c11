//! What a verb answers: a word, and flat texts behind it.

use filters::money::Amount;
use redis::Value;

use super::pools::Fence;
use super::{RedisError, RunId};

pub(super) struct Answer {
    pub(super) word: String,
    rest: std::vec::IntoIter<Value>,
}

impl Answer {
    pub(super) fn read(value: Value) -> Result<Self, RedisError> {
        let Value::Array(values) = value else { return Err(RedisError::Unreadable) };
        let mut rest = values.into_iter();
        let word = text(rest.next().ok_or(RedisError::Unreadable)?)?;
        Ok(Self { word, rest })
    }

    /// The answer of a verb that cannot but succeed, unless the server is another one.
    pub(super) fn good(mut self) -> Result<Self, RedisError> {
        match self.word.as_str() {
            "OK" => Ok(self),
            "STALE" => Err(RedisError::Stale(self.fence()?)),
            _ => Err(RedisError::Unreadable),
        }
    }

    pub(super) fn fence(&mut self) -> Result<Fence, RedisError> {
        let run = RunId(self.text()?);
        let epoch = self.text()?;
        let epoch =
            if epoch.is_empty() { None } else { Some(epoch.parse().map_err(|_| RedisError::Unreadable)?) };
        Ok(Fence { run, epoch })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.len() == 0
    }

    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, RedisError> {
        bytes(self.rest.next().ok_or(RedisError::Unreadable)?)
    }

    pub(super) fn text(&mut self) -> Result<String, RedisError> {
        text(self.rest.next().ok_or(RedisError::Unreadable)?)
    }

    pub(super) fn number<T: std::str::FromStr>(&mut self) -> Result<T, RedisError> {
        self.text()?.parse().map_err(|_| RedisError::Unreadable)
    }

    pub(super) fn amount(&mut self) -> Result<Amount, RedisError> {
        self.number().map(Amount::from_nano)
    }
}

fn bytes(value: Value) -> Result<Vec<u8>, RedisError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        Value::SimpleString(text) => Ok(text.into_bytes()),
        _ => Err(RedisError::Unreadable),
    }
}

fn text(value: Value) -> Result<String, RedisError> {
    String::from_utf8(bytes(value)?).map_err(|_| RedisError::Unreadable)
}
