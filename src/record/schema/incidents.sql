-- What went wrong, for the status page. `models` is a list and `title` a map from language to text, both in JSON.
CREATE TABLE incident (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    automatic INTEGER NOT NULL CHECK (automatic IN (0, 1)),
    edited    INTEGER NOT NULL CHECK (edited IN (0, 1)),
    severity  TEXT    NOT NULL,
    models    TEXT    NOT NULL,
    title     TEXT    NOT NULL,
    opened_ms INTEGER NOT NULL,
    closed_ms INTEGER,
    seen_ms   INTEGER NOT NULL
) STRICT;
CREATE INDEX incident_opened ON incident (opened_ms);

-- What was said about it, in order. `text` is a map as `title` is; the machine says nothing but its word.
CREATE TABLE incident_update (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    incident INTEGER NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
    at_ms    INTEGER NOT NULL,
    word     TEXT    NOT NULL,
    text     TEXT    NOT NULL
) STRICT;
CREATE INDEX incident_update_of ON incident_update (incident);
