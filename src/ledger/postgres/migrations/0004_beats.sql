-- How the periodic jobs of every node do: its latest word on each. Times are milliseconds since 1970, 0 for never.
-- Mirrors src/record/schema/beats.sql.
CREATE TABLE beat (
    node         text   NOT NULL,
    job          text   NOT NULL,
    period_ms    bigint NOT NULL,
    started_ms   bigint NOT NULL,
    succeeded_ms bigint NOT NULL,
    failed_ms    bigint NOT NULL,
    failure      text   NOT NULL,
    told_ms      bigint NOT NULL,
    PRIMARY KEY (node, job)
);
