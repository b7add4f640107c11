-- What happened, kept for people. Mirrors src/record/schema/attempts.sql and minutes.sql; no money is in it.

-- Names that rows have in common: of models, endpoints and regions, and words from the log. They are few, and stay.
CREATE TABLE record_word (
    id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    text text   NOT NULL UNIQUE
);

-- The last batch of each process: one that comes again is not written again.
CREATE TABLE record_writer (
    boot  bigint PRIMARY KEY,
    batch bigint NOT NULL,
    at_ms bigint NOT NULL
);

-- Everything that was decided about candidates, but for what is in attempt_served. A partition is a day, so that what is
-- old goes at once.
CREATE TABLE attempt (
    at_ms          bigint NOT NULL,
    boot           bigint NOT NULL,
    seq            bigint NOT NULL,
    request        text   NOT NULL,
    model          bigint NOT NULL,
    candidate      bigint NOT NULL,
    region         bigint NOT NULL,
    attempt        bigint NOT NULL,
    reason         bigint NOT NULL,
    elapsed_ms     bigint NOT NULL,
    budget_left_ms bigint NOT NULL,
    outcome        bigint NOT NULL,
    next           bigint NOT NULL,
    PRIMARY KEY (at_ms, boot, seq)
) PARTITION BY RANGE (at_ms);
CREATE INDEX attempt_request ON attempt (request);

-- First attempts that served: by far the most, and of the least interest.
CREATE TABLE attempt_served (LIKE attempt INCLUDING CONSTRAINTS, PRIMARY KEY (at_ms, boot, seq)) PARTITION BY RANGE (at_ms);

-- Makes the partitions of a day since 1970, where they are missing.
CREATE FUNCTION make_attempt_partitions(day bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    whole text;
BEGIN
    PERFORM pg_advisory_xact_lock(7465, 1);
    FOREACH whole IN ARRAY ARRAY['attempt', 'attempt_served'] LOOP
        EXECUTE format('CREATE TABLE IF NOT EXISTS %I PARTITION OF %I FOR VALUES FROM (%s) TO (%s)',
            whole || '_' || to_char(date '1970-01-01' + day::integer, 'YYYYMMDD'), whole,
            day * 86400000, (day + 1) * 86400000);
    END LOOP;
END
$$;

-- Drops the partitions of one of the two that lie wholly before a time. Answers how many.
CREATE FUNCTION drop_attempt_partitions(whole text, before_ms bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    part    text;
    dropped integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(7465, 1);
    FOR part IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = whole::regclass
          AND c.relname <= whole || '_' || to_char(date '1970-01-01' + (before_ms / 86400000 - 1)::integer, 'YYYYMMDD')
    LOOP
        EXECUTE format('DROP TABLE %I', part);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END
$$;

-- Good and bad calls by the minute in which they began, and by the hour for those who look back longer. docs/slo.md.
CREATE TABLE slo_minute (
    start_ms bigint NOT NULL CHECK (start_ms % 60000 = 0),
    model    bigint NOT NULL,
    upstream bigint NOT NULL,
    region   bigint NOT NULL,
    cause    bigint NOT NULL,
    good     bigint NOT NULL CHECK (good >= 0),
    bad      bigint NOT NULL CHECK (bad >= 0),
    in_time  bigint NOT NULL CHECK (in_time >= 0),
    late     bigint NOT NULL CHECK (late >= 0),
    PRIMARY KEY (start_ms, model, upstream, region, cause)
);

CREATE TABLE slo_hour (
    start_ms bigint NOT NULL CHECK (start_ms % 3600000 = 0),
    model    bigint NOT NULL,
    region   bigint NOT NULL,
    good     bigint NOT NULL CHECK (good >= 0),
    bad      bigint NOT NULL CHECK (bad >= 0),
    in_time  bigint NOT NULL CHECK (in_time >= 0),
    late     bigint NOT NULL CHECK (late >= 0),
    PRIMARY KEY (start_ms, model, region)
);
