//! YAML text → a JSON value, with `${VAR}` filled in and the line of every path kept.
//!
//! Variables are filled in inside scalars, after parsing: a secret with a `#` or a `:` in it cannot
//! change the shape of the file. `${VAR}` must be set, `${VAR:-default}` need not be, `$${` is a
//! plain `${`.

use std::collections::BTreeMap;

use saphyr::{LoadableYamlNode, MarkedYaml, Scalar, YamlData};
use serde_json::{Map, Value};

use super::{Fault, Faults, join};

/// A parsed file.
pub(super) struct Document {
    pub(super) value: Value,
    pub(super) lines: Lines,
    pub(super) faults: Faults,
}

/// The line of every path.
#[derive(Default)]
pub(super) struct Lines(BTreeMap<String, usize>);

impl Lines {
    /// The line of `path`, or of the closest thing around it.
    pub(super) fn nearest(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some(line) = self.0.get(path) {
                return Some(*line);
            }
            let cut = path.rfind(['.', '['])?;
            path = path.get(..cut)?;
        }
    }
}

/// Parses a file. Faults that leave a value to go on with are collected.
pub(super) fn read(text: &str, var: &dyn Fn(&str) -> Option<String>) -> Result<Document, Faults> {
    let documents = MarkedYaml::load_from_str(text).map_err(|e| {
        Faults(vec![Fault { path: String::new(), message: format!("not valid YAML: {e}"), line: None }])
    })?;
    let mut reader = Reader { var, lines: Lines::default(), faults: Faults::default() };
    let value = match documents.as_slice() {
        [] => Value::Object(Map::new()),
        [one] => reader.node(one, ""),
        _ => return Err(Faults::one("", "more than one YAML document in the file: keep one")),
    };
    Ok(Document { value, lines: reader.lines, faults: reader.faults })
}

struct Reader<'a> {
    var: &'a dyn Fn(&str) -> Option<String>,
    lines: Lines,
    faults: Faults,
}

impl Reader<'_> {
    fn node(&mut self, node: &MarkedYaml<'_>, path: &str) -> Value {
        self.lines.0.entry(path.to_owned()).or_insert_with(|| node.span.start.line());
        match &node.data {
            YamlData::Sequence(items) => {
                let items = items.iter().enumerate();
                items.map(|(index, item)| self.node(item, &format!("{path}[{index}]"))).collect()
            }
            YamlData::Mapping(members) => {
                let mut map = Map::new();
                for (key, value) in members {
                    let Some(name) = key_text(key) else {
                        self.faults.push(path, "a key that is no plain text");
                        continue;
                    };
                    let path = join(path, &name);
                    self.lines.0.insert(path.clone(), key.span.start.line());
                    let value = self.node(value, &path);
                    map.insert(name, value);
                }
                Value::Object(map)
            }
            YamlData::Value(scalar) => self.scalar(scalar, path),
            YamlData::Tagged(_, inner) => self.node(inner, path),
            YamlData::Representation(text, ..) => Value::String(self.fill(text, path)),
            YamlData::Alias(_) | YamlData::BadValue => {
                self.faults.push(path, "cannot be read: aliases are not supported");
                Value::Null
            }
        }
    }

    fn scalar(&mut self, scalar: &Scalar<'_>, path: &str) -> Value {
        match scalar {
            Scalar::Null => Value::Null,
            Scalar::Boolean(flag) => Value::Bool(*flag),
            Scalar::Integer(number) => Value::from(*number),
            Scalar::FloatingPoint(number) => {
                self.faults.push(
                    path,
                    format!(
                        "put quotes around the number: \"{number}\" (it is read exactly, not as a float)"
                    ),
                );
                Value::Null
            }
            Scalar::String(text) => Value::String(self.fill(text, path)),
        }
    }

    fn fill(&mut self, text: &str, path: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            if let Some(plain) = before.strip_suffix('$') {
                out.push_str(plain);
                out.push_str("${");
                rest = after;
                continue;
            }
            out.push_str(before);
            let Some((inside, behind)) = after.split_once('}') else {
                self.faults.push(path, "`${` without its `}`; write `$${` for a plain one");
                return out;
            };
            rest = behind;
            let (name, default) = match inside.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inside, None),
            };
            match (self.var)(name).filter(|value| !value.is_empty()).or_else(|| default.map(str::to_owned)) {
                Some(value) => out.push_str(&value),
                None => self.faults.push(
                    path,
                    format!("the environment variable `{name}` is not set; set it, or write `${{{name}:-default}}`"),
                ),
            }
        }
        out.push_str(rest);
        out
    }
}

fn key_text(key: &MarkedYaml<'_>) -> Option<String> {
    match &key.data {
        YamlData::Value(Scalar::String(text)) => Some(text.to_string()),
        YamlData::Value(Scalar::Integer(number)) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(name: &str) -> Option<String> {
        match name {
            "KEY" => Some("a: #b".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn variables_are_filled_in_inside_scalars_only() {
        let found = read("a: \"x ${KEY} y\"\nb: ${NONE:-7}\nc: $${KEY}\nd: ${EMPTY:-e}\n", &vars).unwrap();
        assert_eq!(found.value["a"], "x a: #b y");
        assert_eq!(found.value["b"], "7");
        assert_eq!(found.value["c"], "${KEY}");
        assert_eq!(found.value["d"], "e");
    }

    #[test]
    fn all_faults_come_with_their_path() {
        let found = read("a:\n  - ${NONE}\n  - x: 1.5\nb: ${\n", &vars).unwrap();
        let paths: Vec<_> = found.faults.0.iter().map(|f| f.path.as_str()).collect();
        assert_eq!(paths, ["a[0]", "a[1].x", "b"]);
        assert_eq!(found.lines.nearest("a[1].x.deeper"), Some(3));
    }

    #[test]
    fn broken_yaml_is_said_to_be_broken() {
        assert!(read("a: [1, 2", &vars).is_err());
        assert!(read("a: 1\n---\nb: 2\n", &vars).is_err());
        assert!(read("a: 1\na: 2\n", &vars).is_err(), "a key twice");
    }
}
