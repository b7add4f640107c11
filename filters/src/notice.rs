//! Which of all that happens is worth telling somebody, and when.
//!
//! A **fact** has a key ("the breaker of p/m") and is so or is not so; an **incident** of a key just happens. Within one
//! window of time a key is told of once: the first time a fact is so, the first time it is not so any more, the first
//! incident. Whatever else comes within the window is counted, and at its end there is one summary of it, with how it is
//! by then. A fact that goes to and fro all day is one word a window, and the last word on it is always true.
//!
//! What is so stays so until it is not: saying it again is silent, however long it lasts, and the end of what nobody was
//! told of is silent too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What has become of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// It is so from now on.
    Begins,
    /// It is not so any more.
    Ends,
    /// It happened.
    Happens,
}

/// All keys of which something was heard lately. `T` is what there is to say of one.
#[derive(Debug)]
pub struct Notices<T> {
    window: Duration,
    keys_max: usize,
    keys: BTreeMap<String, Heard<T>>,
}

#[derive(Debug)]
struct Heard<T> {
    /// What was said last.
    latest: T,
    /// It is so now.
    is_so: bool,
    /// Whoever listens thinks that it is so.
    is_told_so: bool,
    /// When the window began.
    since: Instant,
    /// What of this window was told already.
    told: [bool; 3],
    /// Changes and incidents that were not told.
    untold: u32,
}

/// At the end of a window: what there was beside what was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary<T> {
    /// What was said last.
    pub latest: T,
    /// How many changes or incidents were not told by themselves.
    pub untold: u32,
    /// For a fact: whether it is so. An incident is not.
    pub is_so: bool,
}

impl<T: Clone> Notices<T> {
    /// One word a key in so much time. At most `keys_max` keys are remembered: at the bound the one of which nothing was
    /// heard for longest is forgotten, those first that are not so.
    #[must_use]
    pub const fn new(window: Duration, keys_max: usize) -> Self {
        Self { window, keys_max, keys: BTreeMap::new() }
    }

    /// Something was heard. Answers whether to tell it now.
    pub fn hear(&mut self, now: Instant, key: &str, turn: Turn, what: T) -> bool {
        if !self.keys.contains_key(key) {
            if turn == Turn::Ends {
                return false;
            }
            self.make_room();
            let new = Heard {
                latest: what.clone(),
                is_so: false,
                is_told_so: false,
                since: now,
                told: [false; 3],
                untold: 0,
            };
            self.keys.insert(key.to_owned(), new);
        }
        let window = self.window;
        let Some(heard) = self.keys.get_mut(key) else { return false };
        let is_new = match turn {
            Turn::Begins => !std::mem::replace(&mut heard.is_so, true),
            Turn::Ends => std::mem::replace(&mut heard.is_so, false),
            Turn::Happens => true,
        };
        if !is_new {
            return false;
        }
        heard.latest = what;
        if now.saturating_duration_since(heard.since) >= window && heard.untold == 0 {
            heard.since = now;
            heard.told = [false; 3];
        }
        let slot = match turn {
            Turn::Begins => 0,
            Turn::Ends => 1,
            Turn::Happens => 2,
        };
        let told = heard.told.get_mut(slot).is_none_or(|told| std::mem::replace(told, true));
        // The end of what nobody was told of is nothing to tell, but a change all the same.
        let is_news = turn == Turn::Happens || heard.is_so != heard.is_told_so;
        if told || !is_news || heard.untold > 0 {
            heard.untold = heard.untold.saturating_add(1);
            return false;
        }
        heard.is_told_so = heard.is_so;
        true
    }

    /// Whether a fact is so, as far as was heard.
    #[must_use]
    pub fn is_so(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|heard| heard.is_so)
    }

    /// What windows that are over leave to be told.
    pub fn due(&mut self, now: Instant) -> Vec<Summary<T>> {
        let window = self.window;
        let over = |heard: &Heard<T>| now.saturating_duration_since(heard.since) >= window;
        let mut due = vec![];
        for heard in self.keys.values_mut().filter(|heard| over(heard)) {
            let untold = std::mem::take(&mut heard.untold);
            if untold > 0 {
                due.push(Summary { latest: heard.latest.clone(), untold, is_so: heard.is_so });
                heard.is_told_so = heard.is_so;
                // Whatever goes on like this gets one summary a window.
                heard.since = now;
                heard.told = [true; 3];
            }
        }
        self.keys.retain(|_, heard| heard.is_so || !over(heard));
        due
    }

    /// How many keys are remembered.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    fn make_room(&mut self) {
        if self.keys.len() < self.keys_max {
            return;
        }
        let oldest = self.keys.iter().min_by_key(|(_, heard)| (heard.is_so, heard.since));
        if let Some(key) = oldest.map(|(key, _)| key.clone()) {
            self.keys.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: Duration = Duration::from_secs(300);

    fn at(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn a_fault_is_told_once_and_so_is_its_end() {
        let (begin, mut notices) = (Instant::now(), Notices::new(WINDOW, 9));
        assert!(notices.hear(begin, "k", Turn::Begins, 1));
        assert!(!notices.hear(at(begin, 1), "k", Turn::Begins, 2));
        assert!(!notices.hear(at(begin, 999), "k", Turn::Begins, 3), "it is so still");
        assert!(notices.hear(at(begin, 1000), "k", Turn::Ends, 4));
        assert!(!notices.hear(at(begin, 1001), "k", Turn::Ends, 5));
        assert_eq!(notices.due(at(begin, 2000)), []);
        assert_eq!(notices.keys(), 0);
        assert!(!notices.hear(at(begin, 2001), "other", Turn::Ends, 6), "it never began");
    }

    #[test]
    fn what_goes_to_and_fro_is_summed_up_once_a_window() {
        let (begin, mut notices) = (Instant::now(), Notices::new(WINDOW, 9));
        let mut told = 0;
        for second in 0..20 {
            let turn = if second % 2 == 0 { Turn::Begins } else { Turn::Ends };
            told += u32::from(notices.hear(at(begin, second), "k", turn, second));
        }
        assert_eq!(told, 2, "the first time it was so, and the first time it was not");
        assert_eq!(notices.due(at(begin, 299)), []);
        let summary = notices.due(at(begin, 300));
        assert_eq!(summary, [Summary { latest: 19, untold: 18, is_so: false }]);
        assert!(!notices.hear(at(begin, 310), "k", Turn::Begins, 310));
        assert_eq!(notices.due(at(begin, 600)), [Summary { latest: 310, untold: 1, is_so: true }]);
        assert_eq!(notices.due(at(begin, 1200)), [], "so it stays");
        assert!(notices.hear(at(begin, 1300), "k", Turn::Ends, 1300), "and its end is told");
    }

    #[test]
    fn incidents_of_one_key_are_counted() {
        let (begin, mut notices) = (Instant::now(), Notices::new(WINDOW, 9));
        assert!(notices.hear(begin, "k", Turn::Happens, 1));
        assert!(!notices.hear(at(begin, 1), "k", Turn::Happens, 2));
        assert!(!notices.hear(at(begin, 2), "k", Turn::Happens, 3));
        assert!(notices.hear(at(begin, 2), "other", Turn::Happens, 4));
        assert_eq!(notices.due(at(begin, 301)), [Summary { latest: 3, untold: 2, is_so: false }]);
        assert_eq!(notices.due(at(begin, 900)), []);
        assert!(notices.hear(at(begin, 901), "k", Turn::Happens, 5));
    }

    proptest! {
        #[test]
        fn the_last_word_is_true_and_words_are_few(
            turns in prop::collection::vec((0_u64..100, any::<bool>()), 1..200),
        ) {
            let begin = Instant::now();
            let mut notices = Notices::new(WINDOW, 9);
            let (mut now, mut is_so, mut thinks, mut words) = (0, false, false, 0_u64);
            for (pause, so) in turns {
                now += pause;
                for summary in notices.due(at(begin, now)) {
                    thinks = summary.is_so;
                    words += 1;
                }
                is_so = so;
                let turn = if so { Turn::Begins } else { Turn::Ends };
                if notices.hear(at(begin, now), "k", turn, ()) {
                    prop_assert_ne!(thinks, so, "nobody is told what he knows");
                    thinks = so;
                    words += 1;
                }
            }
            if let Some(summary) = notices.due(at(begin, now + 301)).pop() {
                thinks = summary.is_so;
            }
            prop_assert_eq!(thinks, is_so);
            prop_assert!(words <= 3 * (now / 300 + 1), "{words} words in {now} s");
        }

        #[test]
        fn keys_are_bounded(keys in prop::collection::vec((0_u8..200, 0_u8..3), 0..500)) {
            let begin = Instant::now();
            let mut notices = Notices::new(WINDOW, 20);
            for (key, turn) in keys {
                let turn = [Turn::Begins, Turn::Ends, Turn::Happens][usize::from(turn)];
                notices.hear(begin, &key.to_string(), turn, ());
                prop_assert!(notices.keys() <= 20);
            }
        }
    }
}
