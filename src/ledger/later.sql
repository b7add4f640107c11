-- What the embedded ledger got after its first version. A binary that knows nothing of it can use the file all the same.

-- The latest change of each key, or of the settings of its account, by a number that grows: what a running gateway follows.
-- A key that has not changed since this table is there is not in it.
CREATE TABLE IF NOT EXISTS key_change (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE
) STRICT;
CREATE TRIGGER IF NOT EXISTS key_is_made AFTER INSERT ON api_key
BEGIN
    DELETE FROM key_change WHERE digest = NEW.digest;
    INSERT INTO key_change (digest) VALUES (NEW.digest);
END;
CREATE TRIGGER IF NOT EXISTS key_changes AFTER UPDATE ON api_key
WHEN (OLD.settings, OLD.expires_ms, OLD.revoked_ms) IS NOT (NEW.settings, NEW.expires_ms, NEW.revoked_ms)
BEGIN
    DELETE FROM key_change WHERE digest = NEW.digest;
    INSERT INTO key_change (digest) VALUES (NEW.digest);
END;
CREATE TRIGGER IF NOT EXISTS account_changes AFTER UPDATE OF settings ON account WHEN OLD.settings <> NEW.settings
BEGIN
    DELETE FROM key_change WHERE digest IN (SELECT digest FROM api_key WHERE account = NEW.id);
    INSERT INTO key_change (digest) SELECT digest FROM api_key WHERE account = NEW.id;
END;

-- Accounts with money that no process has leased yet: few, of however many there are.
CREATE INDEX IF NOT EXISTS balance_free ON balance (account) WHERE posted > leased;
