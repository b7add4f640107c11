-- The decision log and who has written it. Mirrors src/ledger/postgres/migrations/0002_records.sql.

-- Names that rows have in common: of models, endpoints and regions, and words from the log. They are few, and stay.
CREATE TABLE record_word (
    id   INTEGER PRIMARY KEY,
    text TEXT    NOT NULL UNIQUE
);

-- The last batch of each process: one that comes again is not written again.
CREATE TABLE record_writer (
    boot  INTEGER PRIMARY KEY,
    batch INTEGER NOT NULL,
    at_ms INTEGER NOT NULL
);

-- Everything that was decided about candidates, but for what is in attempt_served.
CREATE TABLE attempt (
    at_ms          INTEGER NOT NULL,
    boot           INTEGER NOT NULL,
    seq            INTEGER NOT NULL,
    request        TEXT    NOT NULL,
    model          INTEGER NOT NULL,
    candidate      INTEGER NOT NULL,
    region         INTEGER NOT NULL,
    attempt        INTEGER NOT NULL,
    reason         INTEGER NOT NULL,
    elapsed_ms     INTEGER NOT NULL,
    budget_left_ms INTEGER NOT NULL,
    outcome        INTEGER NOT NULL,
    next           INTEGER NOT NULL,
    PRIMARY KEY (at_ms, boot, seq)
) WITHOUT ROWID;
CREATE INDEX attempt_request ON attempt (request);

-- First attempts that served: by far the most, and of the least interest. Only appended to, so that one costs little.
CREATE TABLE attempt_served (
    at_ms          INTEGER NOT NULL,
    boot           INTEGER NOT NULL,
    seq            INTEGER NOT NULL,
    request        TEXT    NOT NULL,
    model          INTEGER NOT NULL,
    candidate      INTEGER NOT NULL,
    region         INTEGER NOT NULL,
    attempt        INTEGER NOT NULL,
    reason         INTEGER NOT NULL,
    elapsed_ms     INTEGER NOT NULL,
    budget_left_ms INTEGER NOT NULL,
    outcome        INTEGER NOT NULL,
    next           INTEGER NOT NULL,
    PRIMARY KEY (at_ms, boot, seq)
) WITHOUT ROWID;
