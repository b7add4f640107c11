-- One row a probe: was a route well when it was asked? Costs are nano-dollars. Mirrors src/record/schema/probes.sql.
CREATE TABLE probe (
    id        bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at_ms     bigint  NOT NULL,
    model     text    NOT NULL,
    endpoint  text    NOT NULL,
    region    text    NOT NULL,
    ok        boolean NOT NULL,
    reason    text    NOT NULL,
    took_ms   bigint  NOT NULL CHECK (took_ms >= 0),
    cost_nano bigint  NOT NULL CHECK (cost_nano >= 0)
);
CREATE INDEX probe_at ON probe (at_ms);

-- What one node does for all: who has the turn, and until when it does not come back by itself.
CREATE TABLE turn (
    what     text        PRIMARY KEY,
    node     text        NOT NULL,
    until_at timestamptz NOT NULL
);
