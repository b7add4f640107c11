-- First attempts that served, many in a row: src/record/pages.rs reads and writes `page`. `attempt_served` has those of
-- earlier versions until they are old. A fleet keeps a row for each.
CREATE TABLE served_page (
    id      INTEGER PRIMARY KEY,
    from_ms INTEGER NOT NULL,
    to_ms   INTEGER NOT NULL,
    boot    INTEGER NOT NULL,
    rows    INTEGER NOT NULL CHECK (rows > 0),
    page    BLOB    NOT NULL
) STRICT;
CREATE INDEX served_page_to ON served_page (to_ms);
