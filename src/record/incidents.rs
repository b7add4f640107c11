//! Incidents: what went wrong, whom it hit, and what was said about it.
//!
//! Every change reads what there is and writes under one lock (`SQLite`'s own, an advisory one in Postgres), so that nodes
//! that see the same trouble at once open one incident. When that has to happen is decided in
//! [`filters::status::incident`]; here is what is kept, for the machine and for people.
//!
//! Closed ones are kept for `KEPT_DAYS`, and `ROWS_MAX` at most: the oldest go first. One has at most
//! `UPDATES_MAX` updates; then people are told, and the machine says no more.

use std::collections::{BTreeMap, BTreeSet};

use deadpool_postgres::Transaction;
use filters::status::Level;
use filters::status::incident::{Change, Known, Troubled, plan};
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::{Place, RecordError, Records, locked};
use crate::ledger::LedgerError;

/// How many days a closed incident is kept.
const KEPT_DAYS: i64 = 400;
/// How many incidents are kept at most.
const ROWS_MAX: i64 = 1_000;
/// How many updates one may have.
const UPDATES_MAX: usize = 100;
/// How long one that has closed may be opened again, in milliseconds: the machine asks for no older ones.
const LATELY_MS: i64 = 3_600_000;
/// The longest title and the longest text of an update, in bytes.
const TITLE_BYTES_MAX: usize = 300;
const TEXT_BYTES_MAX: usize = 4_000;
/// How many models one may name.
const MODELS_MAX: usize = 500;
/// How many languages a text may have.
const LANGUAGES_MAX: usize = 16;
/// The lock in Postgres, beside those of the ledger.
const LOCK: &str = "SELECT pg_advisory_xact_lock(7465, 20)";

/// A text by its language, such as `en`.
pub type Texts = BTreeMap<String, String>;

/// An incident with all that was said about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    pub id: i64,
    /// The machine opened it.
    pub automatic: bool,
    /// A person opened it or changed it: the machine leaves it alone.
    pub edited: bool,
    /// The worst that it was.
    pub severity: Level,
    /// Whom it is about; none: everything.
    pub models: BTreeSet<String>,
    /// What a person called it. The machine gives no names: a page makes one in its reader's language.
    pub title: Texts,
    /// When it began: milliseconds since 1970, as all times here.
    pub opened_ms: i64,
    /// When it ended, if it did.
    pub closed_ms: Option<i64>,
    /// When a node last saw trouble.
    pub seen_ms: i64,
    /// In order.
    pub updates: Vec<Update>,
}

/// Something that was said about an incident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub at_ms: i64,
    pub word: Word,
    /// What a person wrote.
    pub text: Texts,
}

/// What an update is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Opened,
    /// It got worse, or hit more models.
    Worse,
    /// It had closed, and is back.
    Again,
    /// News.
    Note,
    Closed,
}

/// What a person does with incidents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case", deny_unknown_fields)]
pub enum Verb {
    /// Those that are open; with `all` the closed ones too.
    List {
        #[serde(default)]
        all: bool,
    },
    /// Open one.
    Open {
        title: Texts,
        #[serde(default)]
        text: Texts,
        severity: String,
        #[serde(default)]
        models: BTreeSet<String>,
    },
    /// Say something about one.
    Update { id: i64, text: Texts },
    /// Close one.
    Close {
        id: i64,
        #[serde(default)]
        text: Texts,
    },
    /// Change one.
    Edit {
        id: i64,
        #[serde(default)]
        title: Option<Texts>,
        #[serde(default)]
        severity: Option<String>,
        #[serde(default)]
        models: Option<BTreeSet<String>>,
    },
}

/// Why something was not done with an incident.
#[derive(Debug, thiserror::Error)]
pub enum VerbError {
    /// An argument makes no sense.
    #[error("{0}")]
    Bad(String),
    /// The records said no.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// One change of the rows.
enum Write {
    New {
        incident: Box<Incident>,
    },
    /// Everything of it but its updates.
    Row {
        incident: Box<Incident>,
    },
    Said {
        id: i64,
        update: Update,
    },
}

impl Word {
    const ALL: [Self; 5] = [Self::Opened, Self::Worse, Self::Again, Self::Note, Self::Closed];

    /// Its name in JSON and in the rows.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Worse => "worse",
            Self::Again => "again",
            Self::Note => "note",
            Self::Closed => "closed",
        }
    }
}

impl Incident {
    fn known(&self) -> Known {
        Known {
            id: self.id,
            is_ours: self.automatic && !self.edited,
            severity: self.severity,
            models: self.models.clone(),
            opened_ms: self.opened_ms,
            closed_ms: self.closed_ms,
            seen_ms: self.seen_ms,
        }
    }
}

impl Records {
    /// The incidents that are open, and those that closed since then, the latest first.
    ///
    /// # Errors
    /// [`RecordError`] when they cannot be read.
    pub fn incidents(&self, closed_since_ms: i64) -> Result<Vec<Incident>, RecordError> {
        match &self.0 {
            Place::File(connection) => Ok(read_file(&locked(connection), closed_since_ms)?),
            Place::Fleet(ledger) => Ok(ledger.within(async |t| read_fleet(t, closed_since_ms).await)?),
        }
    }

    /// Opens, changes and closes what the machine has to, by the trouble that this node sees.
    ///
    /// # Errors
    /// [`RecordError`] when it cannot be read or written; nothing is changed then.
    pub fn follow_incidents(&self, now_ms: i64, troubled: &[Troubled]) -> Result<(), RecordError> {
        let decide = |incidents: &[Incident]| {
            let known: Vec<Known> = incidents.iter().map(Incident::known).collect();
            let changes = plan(now_ms, troubled, &known);
            Ok(changes.iter().flat_map(|change| follow(now_ms, change, incidents)).collect())
        };
        self.change(now_ms, now_ms.saturating_sub(LATELY_MS), decide).map_err(|error| match error {
            VerbError::Record(error) => error,
            // The machine gives no arguments.
            VerbError::Bad(what) => RecordError::Fleet(LedgerError::Violation(what)),
        })
    }

    /// Does what a person asks for; answers the incidents that it is about.
    ///
    /// # Errors
    /// [`VerbError`]; nothing is changed then.
    pub fn incident(&self, now_ms: i64, verb: Verb) -> Result<Vec<Incident>, VerbError> {
        let id = match &verb {
            Verb::List { all } => {
                let since = if *all { 0 } else { i64::MAX };
                return Ok(self.incidents(since)?);
            }
            Verb::Open { .. } => None,
            Verb::Update { id, .. } | Verb::Close { id, .. } | Verb::Edit { id, .. } => Some(*id),
        };
        check(&verb)?;
        self.change(now_ms, 0, |incidents| perform(now_ms, verb, incidents))?;
        let all = self.incidents(0)?;
        let newest = all.iter().map(|incident| incident.id).max();
        Ok(all.into_iter().filter(|incident| Some(incident.id) == id.or(newest)).collect())
    }

    /// Reads, lets one decide, and writes, all under one lock.
    fn change(
        &self,
        now_ms: i64,
        closed_since_ms: i64,
        decide: impl FnOnce(&[Incident]) -> Result<Vec<Write>, VerbError>,
    ) -> Result<(), VerbError> {
        let before_ms = now_ms.saturating_sub(KEPT_DAYS * 86_400_000);
        match &self.0 {
            Place::File(connection) => {
                let mut connection = locked(connection);
                let transaction = connection.transaction().map_err(RecordError::from)?;
                let writes = decide(&read_file(&transaction, closed_since_ms).map_err(RecordError::from)?)?;
                write_file(&transaction, &writes, before_ms).map_err(RecordError::from)?;
                transaction.commit().map_err(RecordError::from)?;
            }
            Place::Fleet(ledger) => {
                // Its own fault passes through the ledger's: it is kept aside meanwhile.
                let mut refused = None;
                let done = ledger.within(async |t| {
                    t.execute(LOCK, &[]).await?;
                    match decide(&read_fleet(t, closed_since_ms).await?) {
                        Ok(writes) => write_fleet(t, &writes, before_ms).await,
                        Err(error) => {
                            refused = Some(error);
                            Ok(())
                        }
                    }
                });
                done.map_err(RecordError::from)?;
                if let Some(error) = refused {
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// What the machine's change does to the rows.
fn follow(now_ms: i64, change: &Change, incidents: &[Incident]) -> Vec<Write> {
    let find = |id: i64| incidents.iter().find(|incident| incident.id == id).cloned();
    let machine = |word| Update { at_ms: now_ms, word, text: Texts::new() };
    match change {
        Change::Open { severity, models, began_ms } => {
            let incident = Incident {
                id: 0,
                automatic: true,
                edited: false,
                severity: *severity,
                models: models.iter().take(MODELS_MAX).cloned().collect(),
                title: Texts::new(),
                opened_ms: *began_ms,
                closed_ms: None,
                seen_ms: now_ms,
                updates: vec![Update { at_ms: *began_ms, ..machine(Word::Opened) }],
            };
            vec![Write::New { incident: Box::new(incident) }]
        }
        Change::GoOn { id, severity, models } => {
            let Some(old) = find(*id) else { return vec![] };
            let word = if old.closed_ms.is_some() {
                Some(Word::Again)
            } else {
                (*severity > old.severity || models.len() > old.models.len()).then_some(Word::Worse)
            };
            let is_full = old.updates.len() >= UPDATES_MAX;
            let said = word.filter(|_| !is_full).map(|word| Write::Said { id: *id, update: machine(word) });
            let incident = Incident {
                severity: *severity,
                models: models.clone(),
                closed_ms: None,
                seen_ms: now_ms,
                ..old
            };
            [Write::Row { incident: Box::new(incident) }].into_iter().chain(said).collect()
        }
        Change::Close { id } => {
            let Some(old) = find(*id) else { return vec![] };
            let incident = Incident { closed_ms: Some(now_ms), ..old };
            let said = Write::Said { id: *id, update: machine(Word::Closed) };
            vec![Write::Row { incident: Box::new(incident) }, said]
        }
    }
}

/// What a person's verb does to the rows.
fn perform(now_ms: i64, verb: Verb, incidents: &[Incident]) -> Result<Vec<Write>, VerbError> {
    let find = |id: i64| {
        let found = incidents.iter().find(|incident| incident.id == id).cloned();
        found.ok_or_else(|| VerbError::Bad(format!("there is no incident {id}")))
    };
    let say = |word, text| Update { at_ms: now_ms, word, text };
    let has_room = |incident: &Incident| {
        let has = incident.updates.len() < UPDATES_MAX;
        has.then_some(())
            .ok_or_else(|| VerbError::Bad(format!("it has {UPDATES_MAX} updates: open another one")))
    };
    Ok(match verb {
        Verb::List { .. } => vec![],
        Verb::Open { title, text, severity, models } => {
            let incident = Incident {
                id: 0,
                automatic: false,
                edited: true,
                severity: level(&severity)?,
                models,
                title,
                opened_ms: now_ms,
                closed_ms: None,
                seen_ms: now_ms,
                updates: vec![say(Word::Opened, text)],
            };
            vec![Write::New { incident: Box::new(incident) }]
        }
        Verb::Update { id, text } => {
            let incident = Incident { edited: true, ..find(id)? };
            has_room(&incident)?;
            let update = say(Word::Note, text);
            vec![Write::Row { incident: Box::new(incident) }, Write::Said { id, update }]
        }
        Verb::Close { id, text } => {
            let incident = find(id)?;
            if incident.closed_ms.is_some() {
                return Err(VerbError::Bad(format!("incident {id} is closed already")));
            }
            // Its end is always told, whatever room there is.
            let incident = Incident { edited: true, closed_ms: Some(now_ms), ..incident };
            let update = say(Word::Closed, text);
            vec![Write::Row { incident: Box::new(incident) }, Write::Said { id, update }]
        }
        Verb::Edit { id, title, severity, models } => {
            let old = find(id)?;
            let severity = severity.map(|word| level(&word)).transpose()?;
            let incident = Incident {
                edited: true,
                severity: severity.unwrap_or(old.severity),
                models: models.unwrap_or_else(|| old.models.clone()),
                title: title.unwrap_or_else(|| old.title.clone()),
                ..old
            };
            vec![Write::Row { incident: Box::new(incident) }]
        }
    })
}

fn level(word: &str) -> Result<Level, VerbError> {
    Level::named(word)
        .filter(|level| *level > Level::Operational)
        .ok_or_else(|| VerbError::Bad("a severity is one of degraded, partly_down, down".to_owned()))
}

/// Whether texts and names are such as can be kept and shown.
fn check(verb: &Verb) -> Result<(), VerbError> {
    let texts = |what: &str, texts: &Texts, bytes_max: usize, must: bool| {
        let languages = texts.keys().all(|language| {
            (2..=8).contains(&language.len()) && language.bytes().all(|b| b.is_ascii_lowercase() || b == b'-')
        });
        if !languages || texts.len() > LANGUAGES_MAX {
            return Err(VerbError::Bad(format!("{what}: a language is a code such as `en` or `fa`")));
        }
        let sound = |text: &String| {
            let plain = text.chars().all(|c| !c.is_control() || c == '\n');
            plain && !text.trim().is_empty() && text.len() <= bytes_max
        };
        if !texts.values().all(sound) || (must && texts.is_empty()) {
            let what = format!("{what}: write 1 to {bytes_max} bytes of plain text");
            return Err(VerbError::Bad(what));
        }
        Ok(())
    };
    let names = |models: &BTreeSet<String>| {
        let sound = |name: &String| (1..=200).contains(&name.len()) && !name.chars().any(char::is_control);
        if models.len() > MODELS_MAX || !models.iter().all(sound) {
            return Err(VerbError::Bad(format!("name at most {MODELS_MAX} models, as callers do")));
        }
        Ok(())
    };
    match verb {
        Verb::List { .. } => Ok(()),
        Verb::Open { title, text, severity: _, models } => {
            texts("title", title, TITLE_BYTES_MAX, true)?;
            texts("text", text, TEXT_BYTES_MAX, false)?;
            names(models)
        }
        Verb::Update { id: _, text } => texts("text", text, TEXT_BYTES_MAX, true),
        Verb::Close { id: _, text } => texts("text", text, TEXT_BYTES_MAX, false),
        Verb::Edit { id: _, title, severity, models } => {
            if title.is_none() && severity.is_none() && models.is_none() {
                return Err(VerbError::Bad(
                    "say what is to be changed: title, severity or models".to_owned(),
                ));
            }
            title.as_ref().map_or(Ok(()), |title| texts("title", title, TITLE_BYTES_MAX, true))?;
            models.as_ref().map_or(Ok(()), names)
        }
    }
}

/// A row as both databases keep it.
struct Row {
    severity: String,
    models: String,
    title: String,
}

impl Row {
    fn of(incident: &Incident) -> Self {
        let Incident { severity, models, title, .. } = incident;
        let json = |value: serde_json::Value| value.to_string();
        Self {
            severity: severity.word().to_owned(),
            models: json(serde_json::json!(models)),
            title: json(serde_json::json!(title)),
        }
    }
}

fn texts(json: &str) -> Texts {
    serde_json::from_str(json).unwrap_or_default()
}

const SELECT: &str =
    "SELECT id, automatic, edited, severity, models, title, opened_ms, closed_ms, seen_ms FROM incident
     WHERE closed_ms IS NULL OR closed_ms >= $1 ORDER BY opened_ms DESC, id DESC";
const SELECT_UPDATES: &str = "SELECT u.incident, u.at_ms, u.word, u.text FROM incident_update u
     JOIN incident i ON i.id = u.incident WHERE i.closed_ms IS NULL OR i.closed_ms >= $1 ORDER BY u.at_ms, u.id";
const INSERT: &str = "INSERT INTO incident
     (automatic, edited, severity, models, title, opened_ms, closed_ms, seen_ms)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING id";
const CHANGE: &str =
    "UPDATE incident SET automatic = $1, edited = $2, severity = $3, models = $4, title = $5,
     opened_ms = $6, closed_ms = $7, seen_ms = $8 WHERE id = $9";
const SAY: &str = "INSERT INTO incident_update (incident, at_ms, word, text) VALUES ($1, $2, $3, $4)";
const FORGET: &str = "DELETE FROM incident WHERE closed_ms < $1 OR id IN
     (SELECT id FROM incident WHERE closed_ms IS NOT NULL ORDER BY opened_ms DESC, id DESC LIMIT 1000000 OFFSET $2)";

/// For `SQLite`, which follows no references unless every connection asks it to.
const FORGET_UPDATES: &str = "DELETE FROM incident_update WHERE incident NOT IN (SELECT id FROM incident)";

/// Gives every incident its updates.
fn assemble(mut incidents: Vec<Incident>, updates: Vec<(i64, i64, String, String)>) -> Vec<Incident> {
    for (id, at_ms, word, text) in updates {
        let Some(word) = Word::ALL.into_iter().find(|one| one.word() == word) else { continue };
        if let Some(incident) = incidents.iter_mut().find(|incident| incident.id == id) {
            incident.updates.push(Update { at_ms, word, text: texts(&text) });
        }
    }
    incidents
}

fn read_file(connection: &Connection, closed_since_ms: i64) -> rusqlite::Result<Vec<Incident>> {
    let mut select = connection.prepare_cached(SELECT)?;
    let incidents = select.query_map([closed_since_ms], |row| {
        Ok(Incident {
            id: row.get(0)?,
            automatic: row.get(1)?,
            edited: row.get(2)?,
            severity: Level::named(&row.get::<_, String>(3)?).unwrap_or(Level::Degraded),
            models: serde_json::from_str(&row.get::<_, String>(4)?).unwrap_or_default(),
            title: texts(&row.get::<_, String>(5)?),
            opened_ms: row.get(6)?,
            closed_ms: row.get(7)?,
            seen_ms: row.get(8)?,
            updates: vec![],
        })
    })?;
    let incidents = incidents.collect::<rusqlite::Result<_>>()?;
    let mut select = connection.prepare_cached(SELECT_UPDATES)?;
    let updates = select
        .query_map([closed_since_ms], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
    Ok(assemble(incidents, updates.collect::<rusqlite::Result<_>>()?))
}

fn write_file(connection: &Connection, writes: &[Write], before_ms: i64) -> rusqlite::Result<()> {
    let say = |id: i64, update: &Update| {
        let text = serde_json::json!(update.text).to_string();
        let mut say = connection.prepare_cached(SAY)?;
        say.execute(params![id, update.at_ms, update.word.word(), text]).map(drop)
    };
    for write in writes {
        match write {
            Write::New { incident } | Write::Row { incident } => {
                let Incident { id, automatic, edited, opened_ms, closed_ms, seen_ms, .. } = &**incident;
                let Row { severity, models, title } = Row::of(incident);
                if matches!(write, Write::New { .. }) {
                    let row =
                        params![automatic, edited, severity, models, title, opened_ms, closed_ms, seen_ms];
                    let id: i64 = connection.prepare_cached(INSERT)?.query_row(row, |row| row.get(0))?;
                    incident.updates.iter().try_for_each(|update| say(id, update))?;
                    connection.execute(FORGET, params![before_ms, ROWS_MAX])?;
                    connection.execute(FORGET_UPDATES, [])?;
                } else {
                    connection.prepare_cached(CHANGE)?.execute(params![
                        automatic, edited, severity, models, title, opened_ms, closed_ms, seen_ms, id
                    ])?;
                }
            }
            Write::Said { id, update } => say(*id, update)?,
        }
    }
    Ok(())
}

async fn read_fleet(t: &Transaction<'_>, closed_since_ms: i64) -> Result<Vec<Incident>, LedgerError> {
    let rows = t.query(&t.prepare_cached(SELECT).await?, &[&closed_since_ms]).await?;
    let incident = |row: &tokio_postgres::Row| {
        Ok::<_, LedgerError>(Incident {
            id: row.try_get(0)?,
            automatic: row.try_get(1)?,
            edited: row.try_get(2)?,
            severity: Level::named(row.try_get(3)?).unwrap_or(Level::Degraded),
            models: serde_json::from_str(row.try_get(4)?).unwrap_or_default(),
            title: texts(row.try_get(5)?),
            opened_ms: row.try_get(6)?,
            closed_ms: row.try_get(7)?,
            seen_ms: row.try_get(8)?,
            updates: vec![],
        })
    };
    let incidents = rows.iter().map(incident).collect::<Result<_, _>>()?;
    let rows = t.query(&t.prepare_cached(SELECT_UPDATES).await?, &[&closed_since_ms]).await?;
    let update = |row: &tokio_postgres::Row| {
        Ok::<_, LedgerError>((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?))
    };
    Ok(assemble(incidents, rows.iter().map(update).collect::<Result<_, _>>()?))
}

async fn write_fleet(t: &Transaction<'_>, writes: &[Write], before_ms: i64) -> Result<(), LedgerError> {
    for write in writes {
        match write {
            Write::New { incident } => {
                let Incident { automatic, edited, opened_ms, closed_ms, seen_ms, .. } = &**incident;
                let Row { severity, models, title } = Row::of(incident);
                let insert = t.prepare_cached(INSERT).await?;
                let row = t
                    .query_one(
                        &insert,
                        &[automatic, edited, &severity, &models, &title, opened_ms, closed_ms, seen_ms],
                    )
                    .await?;
                let id: i64 = row.try_get(0)?;
                for update in &incident.updates {
                    say_in_fleet(t, id, update).await?;
                }
                t.execute(FORGET, &[&before_ms, &ROWS_MAX]).await?;
            }
            Write::Row { incident } => {
                let Incident { id, automatic, edited, opened_ms, closed_ms, seen_ms, .. } = &**incident;
                let Row { severity, models, title } = Row::of(incident);
                let change = t.prepare_cached(CHANGE).await?;
                t.execute(
                    &change,
                    &[automatic, edited, &severity, &models, &title, opened_ms, closed_ms, seen_ms, id],
                )
                .await?;
            }
            Write::Said { id, update } => say_in_fleet(t, *id, update).await?,
        }
    }
    Ok(())
}

async fn say_in_fleet(t: &Transaction<'_>, id: i64, update: &Update) -> Result<(), LedgerError> {
    let text = serde_json::json!(update.text).to_string();
    t.execute(&t.prepare_cached(SAY).await?, &[&id, &update.at_ms, &update.word.word(), &text]).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> (tempfile::TempDir, Records) {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::open(folder.path()).unwrap();
        (folder, records)
    }

    fn trouble(model: &str, level: Level) -> Troubled {
        Troubled { model: model.to_owned(), level, since_ms: 1_000 }
    }

    fn one(code: &str, text: &str) -> Texts {
        Texts::from([(code.to_owned(), text.to_owned())])
    }

    #[test]
    fn the_machines_incident_opens_gets_worse_closes_and_comes_back() {
        let (_folder, records) = records();
        records.follow_incidents(70_000, &[trouble("a", Level::Degraded)]).unwrap();
        records.follow_incidents(80_000, &[trouble("a", Level::Down)]).unwrap();
        let [open] = &records.incidents(0).unwrap()[..] else { panic!("one incident") };
        assert!(open.automatic && !open.edited && open.closed_ms.is_none());
        assert_eq!((open.severity, open.opened_ms), (Level::Down, 1_000));
        records.follow_incidents(1_000_000, &[]).unwrap();
        assert_eq!(records.incidents(1_000_001).unwrap(), [], "it closed before that");
        records.follow_incidents(1_100_000, &[trouble("a", Level::Degraded)]).unwrap();
        let [again] = &records.incidents(0).unwrap()[..] else { panic!("the same incident") };
        let words: Vec<Word> = again.updates.iter().map(|update| update.word).collect();
        assert_eq!(words, [Word::Opened, Word::Worse, Word::Closed, Word::Again]);
        assert_eq!(again.severity, Level::Down, "the worst that it was");
    }

    #[test]
    fn what_a_person_has_changed_the_machine_leaves_alone() {
        let (_folder, records) = records();
        records.follow_incidents(70_000, &[trouble("a", Level::Degraded)]).unwrap();
        let id = records.incidents(0).unwrap()[0].id;
        let title = Some(one("en", "Slow"));
        records.incident(80_000, Verb::Edit { id, title, severity: None, models: None }).unwrap();
        records.follow_incidents(90_000, &[trouble("a", Level::Down)]).unwrap();
        records.follow_incidents(9_000_000, &[]).unwrap();
        let [incident] = &records.incidents(0).unwrap()[..] else { panic!("one incident") };
        assert!(incident.closed_ms.is_none() && incident.severity == Level::Degraded);
        let [closed] = &records.incident(9_100_000, Verb::Close { id, text: Texts::new() }).unwrap()[..]
        else {
            panic!("that one")
        };
        assert_eq!(closed.closed_ms, Some(9_100_000));
    }

    #[test]
    fn a_verb_that_makes_no_sense_changes_nothing() {
        let (_folder, records) = records();
        let open = |title, severity: &str| {
            let verb =
                Verb::Open { title, text: Texts::new(), severity: severity.into(), models: BTreeSet::new() };
            records.incident(1, verb)
        };
        assert!(open(Texts::new(), "down").is_err(), "without a title");
        assert!(open(one("en", "x"), "operational").is_err());
        assert!(open(one("english!", "x"), "down").is_err());
        assert!(open(one("en", "\u{0}"), "down").is_err());
        assert!(open(one("en", &"x".repeat(TITLE_BYTES_MAX + 1)), "down").is_err());
        assert!(records.incident(1, Verb::Update { id: 1, text: one("en", "x") }).is_err(), "there is none");
        assert_eq!(records.incidents(0).unwrap(), []);
        assert!(open(one("fa", "کندی"), "down").is_ok());
    }

    #[test]
    fn updates_are_bounded_and_old_incidents_go() {
        let (_folder, records) = records();
        let open = |now_ms| {
            let verb = Verb::Open {
                title: one("en", "x"),
                text: Texts::new(),
                severity: "down".into(),
                models: BTreeSet::new(),
            };
            records.incident(now_ms, verb).unwrap()[0].id
        };
        let id = open(1);
        let update = || records.incident(2, Verb::Update { id, text: one("en", "x") });
        (1..UPDATES_MAX).for_each(|_| drop(update().unwrap()));
        assert!(matches!(update(), Err(VerbError::Bad(_))));
        records.incident(3, Verb::Close { id, text: Texts::new() }).unwrap();
        let later = open(KEPT_DAYS * 86_400_000 + 4);
        let kept: Vec<i64> = records.incidents(0).unwrap().iter().map(|incident| incident.id).collect();
        assert_eq!(kept, [later]);
    }
}
