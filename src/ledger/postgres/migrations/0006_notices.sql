-- What somebody is still to be told: one row a message and receiver, until it is taken. `receiver` is a digest; `body` is the
-- message as JSON; `teller` is the process that tells it, until `until_at` unless it says so again. By the server's clock: nodes
-- differ. Mirrors src/record/schema/notices.sql.
CREATE TABLE notice (
    receiver text        NOT NULL,
    id       text        NOT NULL,
    at_ms    bigint      NOT NULL,
    body     text        NOT NULL,
    teller   text        NOT NULL,
    until_at timestamptz NOT NULL,
    PRIMARY KEY (receiver, id)
);
