-- Good and bad calls by the minute in which they began, and by the hour for those who look back longer. docs/slo.md.
-- Mirrors src/ledger/postgres/migrations/0002_records.sql.

CREATE TABLE slo_minute (
    start_ms INTEGER NOT NULL CHECK (start_ms % 60000 = 0),
    model    INTEGER NOT NULL,
    upstream INTEGER NOT NULL,
    region   INTEGER NOT NULL,
    cause    INTEGER NOT NULL,
    good     INTEGER NOT NULL CHECK (good >= 0),
    bad      INTEGER NOT NULL CHECK (bad >= 0),
    in_time  INTEGER NOT NULL CHECK (in_time >= 0),
    late     INTEGER NOT NULL CHECK (late >= 0),
    PRIMARY KEY (start_ms, model, upstream, region, cause)
) WITHOUT ROWID;

CREATE TABLE slo_hour (
    start_ms INTEGER NOT NULL CHECK (start_ms % 3600000 = 0),
    model    INTEGER NOT NULL,
    region   INTEGER NOT NULL,
    good     INTEGER NOT NULL CHECK (good >= 0),
    bad      INTEGER NOT NULL CHECK (bad >= 0),
    in_time  INTEGER NOT NULL CHECK (in_time >= 0),
    late     INTEGER NOT NULL CHECK (late >= 0),
    PRIMARY KEY (start_ms, model, region)
) WITHOUT ROWID;
