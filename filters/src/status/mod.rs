//! What the status page says: how a model does now, how it did on past days, and which incidents there are.
//!
//! Four files, four questions. [`now`]: what do a model's routes, probes and calls say together, and for how long
//! has that to last before a page says so? [`incident`]: when does the machine open an incident, add to it, and close
//! it? [`days`]: what is the bar of a day? [`ration`]: how much of the page is given away?
//!
//! Deliberately absent: names of upstreams. A page is read by callers, and what they may know is which model does how
//! well in which region.

pub mod days;
pub mod incident;
pub mod now;
pub mod ration;

/// How something does, the better the less. That nothing is known is apart from all of them: see [`Option`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Nothing is wrong.
    Operational,
    /// Something is wrong that callers need not notice: one route fails while another serves.
    Degraded,
    /// Some calls fail.
    Partly,
    /// Nearly all calls fail.
    Down,
}

impl Level {
    /// From the best to the worst.
    pub const ALL: [Self; 4] = [Self::Operational, Self::Degraded, Self::Partly, Self::Down];

    /// Its name in JSON, in stores and on the command line.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Operational => "operational",
            Self::Degraded => "degraded",
            Self::Partly => "partly_down",
            Self::Down => "down",
        }
    }

    /// The level of that name.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.word() == word)
    }

    /// Its number in metrics, 0 to 3.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Operational => 0,
            Self::Degraded => 1,
            Self::Partly => 2,
            Self::Down => 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_found_by_its_word_and_its_number_grows_with_trouble() {
        for (level, number) in Level::ALL.into_iter().zip(0..) {
            assert_eq!(Level::named(level.word()), Some(level));
            assert_eq!(level.number(), number);
        }
        assert_eq!(Level::named("perfect"), None);
        assert!(Level::ALL.is_sorted());
    }
}
