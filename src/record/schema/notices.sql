-- What somebody is still to be told: one row a message and receiver, until it is taken. `receiver` is a digest; `body` is the
-- message as JSON; `teller` is the process that tells it, until `until_ms` (since 1970) unless it says so again.
-- Mirrors src/ledger/postgres/migrations/0006_notices.sql.
CREATE TABLE notice (
    receiver TEXT    NOT NULL,
    id       TEXT    NOT NULL,
    at_ms    INTEGER NOT NULL,
    body     TEXT    NOT NULL,
    teller   TEXT    NOT NULL,
    until_ms INTEGER NOT NULL,
    PRIMARY KEY (receiver, id)
) STRICT, WITHOUT ROWID;
