//! The verbs in Lua, as a server takes them in.
//!
//! A Function library where the server allows it: functions are saved and replicated, and a library's locals
//! live as long as one process, which makes the fence free. Otherwise (a managed service may block `FUNCTION`)
//! the same source runs as a script by its digest, and asks `INFO` on each call which process it is in.
//!
//! The library's name ends in a digest of its source: a version that nobody can forget to raise. Versions live
//! side by side, so that nodes of two releases may share a server.

use std::fmt::Write as _;

use redis::Cmd;
use sha2::{Digest as _, Sha256};

use super::words::Words;
use crate::digits::first_digits;

/// The verbs: those on money, and those of `fleet`.
pub const SOURCE: &str = concat!(include_str!("library.lua"), include_str!("../../fleet/share.lua"));

/// The source's end as a script. Its one key is the base of a shard's keys.
const AS_SCRIPT: &str = "
local verb = table.remove(ARGV, 1)
return verbs[verb](KEYS[1], ARGV)
";

/// How a server runs verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// By `FCALL`.
    Functions,
    /// By `EVALSHA`.
    Scripts,
}

/// The verbs, ready to be loaded and called.
#[derive(Debug)]
pub(super) struct Library {
    name: String,
    functions: String,
    /// For verbs that need memory, which a full server refuses; and for all others.
    growing: Script,
    other: Script,
}

#[derive(Debug)]
struct Script {
    source: String,
    digest: String,
}

/// Verbs that a server without memory refuses. All others give memory back, or must not fail.
const GROWS: [&str; 2] = ["admit", "install"];

impl Library {
    pub(super) fn new(source: &str) -> Self {
        let digest = Sha256::digest(source.as_bytes());
        let name = format!("tollgate_{}", first_digits(&digest, 6));
        let mut functions = format!("#!lua name={name}\n{source}\n");
        let heads = source.lines().filter_map(|line| line.strip_prefix("function verbs."));
        for verb in heads.filter_map(|head| head.split_once('(')).map(|(verb, _)| verb) {
            let flags = if GROWS.contains(&verb) { "" } else { "'allow-oom'" };
            let _infallible = writeln!(
                functions,
                "redis.register_function{{function_name = '{name}_{verb}', flags = {{{flags}}}, \
                 callback = function(keys, args) return verbs.{verb}(keys[1], args) end}}"
            );
        }
        let script = |head: &str| {
            let source = format!("{head}\n{source}{AS_SCRIPT}");
            // Redis names a script by SHA-1, which it tells when it takes one in.
            Script { digest: redis::Script::new(&source).get_hash().to_owned(), source }
        };
        let (growing, other) = (script("#!lua"), script("#!lua flags=allow-oom"));
        Self { name, functions, growing, other }
    }

    /// Takes the library in; one that is there already is refused by its name, which is as good.
    pub(super) fn load_functions(&self) -> Cmd {
        let mut cmd = redis::cmd("FUNCTION");
        cmd.arg("LOAD").arg(&self.functions);
        cmd
    }

    pub(super) fn load_scripts(&self) -> [Cmd; 2] {
        [&self.growing, &self.other].map(|script| {
            let mut cmd = redis::cmd("SCRIPT");
            cmd.arg("LOAD").arg(&script.source);
            cmd
        })
    }

    /// One call.
    pub(super) fn call(&self, dialect: Dialect, verb: &str, key: &str, words: &Words) -> Cmd {
        let mut cmd = words.room();
        match dialect {
            Dialect::Functions => {
                cmd.arg("FCALL").arg([&self.name, "_", verb].concat()).arg(1).arg(key);
            }
            Dialect::Scripts => {
                let script = if GROWS.contains(&verb) { &self.growing } else { &self.other };
                cmd.arg("EVALSHA").arg(&script.digest).arg(1).arg(key).arg(verb);
            }
        }
        words.add_to(&mut cmd);
        cmd
    }
}
