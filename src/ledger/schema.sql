-- The embedded ledger. Mirrors filters::money::transfer; a row that breaks an invariant cannot be
-- written, `tollgate ledger verify` proves the rest. Amounts are nano-dollars.

CREATE TABLE boot (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    started_ms INTEGER NOT NULL,
    ended      INTEGER NOT NULL DEFAULT 0 CHECK (ended IN (0, 1))
) STRICT;

-- kind 1 customer, 2 house. House accounts have fixed ids (ledger::sqlite::HOUSE).
CREATE TABLE account (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    kind       INTEGER NOT NULL CHECK (kind IN (1, 2)),
    name       TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    settings   TEXT NOT NULL DEFAULT '{}',
    UNIQUE (kind, name)
) STRICT;

-- One row a transfer: balanced by construction. The journal only grows.
CREATE TABLE transfer (
    id        INTEGER PRIMARY KEY,
    reference BLOB NOT NULL,
    kind      INTEGER NOT NULL,
    debit     INTEGER NOT NULL REFERENCES account (id),
    credit    INTEGER NOT NULL REFERENCES account (id),
    amount    INTEGER NOT NULL CHECK (amount > 0),
    reason    TEXT NOT NULL,
    at_ms     INTEGER NOT NULL,
    CHECK (debit <> credit),
    UNIQUE (reference, kind)
) STRICT;
-- For statements and snapshots of customers; of our own accounts only an audit asks, and reads all there is. A query has
-- to say `>= 1000` in these words to be helped by them. Ledgers that are older have both without the condition.
CREATE INDEX transfer_debit ON transfer (debit, id) WHERE debit >= 1000;
CREATE INDEX transfer_credit ON transfer (credit, id) WHERE credit >= 1000;
CREATE TRIGGER transfer_never_changes BEFORE UPDATE ON transfer
BEGIN SELECT RAISE (ABORT, 'a transfer never changes'); END;
CREATE TRIGGER transfer_never_goes BEFORE DELETE ON transfer
BEGIN SELECT RAISE (ABORT, 'a transfer never goes'); END;

-- What we owe each customer, and how much of it running processes may spend.
CREATE TABLE balance (
    account INTEGER PRIMARY KEY REFERENCES account (id),
    posted  INTEGER NOT NULL CHECK (posted >= 0),
    leased  INTEGER NOT NULL CHECK (leased >= 0 AND leased <= posted)
) STRICT;

CREATE TABLE lease (
    account INTEGER NOT NULL REFERENCES account (id),
    boot    INTEGER NOT NULL REFERENCES boot (id),
    amount  INTEGER NOT NULL CHECK (amount >= 0),
    PRIMARY KEY (account, boot)
) STRICT, WITHOUT ROWID;

-- How each hold ended, once.
CREATE TABLE settlement (
    hold          BLOB PRIMARY KEY CHECK (length(hold) = 16),
    account       INTEGER NOT NULL REFERENCES account (id),
    request       TEXT NOT NULL,
    model         TEXT NOT NULL,
    endpoint      TEXT NOT NULL,
    attempts      INTEGER NOT NULL,
    held          INTEGER NOT NULL CHECK (held >= 0),
    captured      INTEGER NOT NULL CHECK (captured >= 0),
    released      INTEGER NOT NULL CHECK (released >= 0),
    excess        INTEGER NOT NULL CHECK (excess >= 0),
    shortfall     INTEGER NOT NULL CHECK (shortfall >= 0),
    provider_cost INTEGER NOT NULL CHECK (provider_cost >= 0),
    abandoned     INTEGER NOT NULL CHECK (abandoned >= 0),
    key_digest    BLOB NOT NULL CHECK (length(key_digest) = 32),
    held_ms       INTEGER NOT NULL,
    price_version INTEGER NOT NULL,
    tokens        TEXT NOT NULL,
    estimated     INTEGER NOT NULL CHECK (estimated IN (0, 1)),
    anomaly       INTEGER NOT NULL CHECK (anomaly IN (0, 1)),
    at_ms         INTEGER NOT NULL,
    CHECK (captured + released = held)
) STRICT, WITHOUT ROWID;
CREATE INDEX settlement_request ON settlement (request);
CREATE INDEX settlement_account ON settlement (account, held_ms);

-- Digests only; the keys themselves are shown once and never kept.
CREATE TABLE api_key (
    digest     BLOB PRIMARY KEY CHECK (length(digest) = 32),
    account    INTEGER NOT NULL REFERENCES account (id),
    hint       TEXT NOT NULL,
    settings   TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    revoked_ms INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX api_key_account ON api_key (account);

-- What each balance was at the end of a day, so that an audit need not begin at the beginning.
CREATE TABLE snapshot (
    account       INTEGER NOT NULL REFERENCES account (id),
    day           INTEGER NOT NULL,
    posted        INTEGER NOT NULL CHECK (posted >= 0),
    last_transfer INTEGER NOT NULL,
    PRIMARY KEY (account, day)
) STRICT, WITHOUT ROWID;

-- Answers of keyed calls, for a day: a repeat gets the first one's answer and no second charge.
CREATE TABLE keyed_call (
    account  INTEGER NOT NULL REFERENCES account (id),
    key      TEXT NOT NULL,
    body     BLOB NOT NULL CHECK (length(body) = 32),
    request  TEXT NOT NULL,
    answer   BLOB,
    at_ms    INTEGER NOT NULL,
    PRIMARY KEY (account, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX keyed_call_at ON keyed_call (at_ms);
