-- How the periodic jobs of a process do: its latest word on each. Times are milliseconds since 1970, 0 for never.
-- Mirrors src/ledger/postgres/migrations/0004_beats.sql.
CREATE TABLE beat (
    node         TEXT NOT NULL,
    job          TEXT NOT NULL,
    period_ms    INTEGER NOT NULL,
    started_ms   INTEGER NOT NULL,
    succeeded_ms INTEGER NOT NULL,
    failed_ms    INTEGER NOT NULL,
    failure      TEXT NOT NULL,
    told_ms      INTEGER NOT NULL,
    PRIMARY KEY (node, job)
) STRICT, WITHOUT ROWID;
