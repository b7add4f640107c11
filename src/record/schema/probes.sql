-- One row a probe: was a route well when it was asked? Costs are nano-dollars. Mirrors src/ledger/postgres/migrations/0003_probes.sql.
CREATE TABLE probe (
    id        INTEGER PRIMARY KEY,
    at_ms     INTEGER NOT NULL,
    model     TEXT NOT NULL,
    endpoint  TEXT NOT NULL,
    region    TEXT NOT NULL,
    ok        INTEGER NOT NULL CHECK (ok IN (0, 1)),
    reason    TEXT NOT NULL,
    took_ms   INTEGER NOT NULL CHECK (took_ms >= 0),
    cost_nano INTEGER NOT NULL CHECK (cost_nano >= 0)
) STRICT;
CREATE INDEX probe_at ON probe (at_ms);
