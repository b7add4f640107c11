-- What went wrong, for the status page. `models` is a list and `title` a map from language to text, both in JSON.
CREATE TABLE incident (
    id        bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    automatic boolean NOT NULL,
    edited    boolean NOT NULL,
    severity  text    NOT NULL,
    models    text    NOT NULL,
    title     text    NOT NULL,
    opened_ms bigint  NOT NULL,
    closed_ms bigint,
    seen_ms   bigint  NOT NULL
);
CREATE INDEX incident_opened ON incident (opened_ms);

-- What was said about it, in order. `text` is a map as `title` is; the machine says nothing but its word.
CREATE TABLE incident_update (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    incident bigint NOT NULL REFERENCES incident (id) ON DELETE CASCADE,
    at_ms    bigint NOT NULL,
    word     text   NOT NULL,
    text     text   NOT NULL
);
CREATE INDEX incident_update_of ON incident_update (incident);
