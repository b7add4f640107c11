//! What a good file becomes, and which field is named when it is not good.

use filters::dialect::{Dialect, Operation};

use super::super::parse;
use super::{Path, REDIS_TIMEOUT_MAX, Store};

const GOOD: &str = r#"
listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }
store: { embedded: { path: ./data } }
providers:
  p: { dialect: openai, base_url: "https://host.example/v1/", credential: "${SECRET}" }
models:
  m:
    price: { input: "1.005", output: 10 }
    limits: { context: 1000, output: 100 }
    routes: [ { provider: p, model: native, cost: { input: "0.5", output: "5" } } ]
bootstrap:
  accounts:
    a: { balance: "1.50", keys: [ { key: sk-test-alpha } ] }
"#;

fn vars(name: &str) -> Option<String> {
    (name == "SECRET").then(|| "prov-key".to_owned())
}

fn faults(text: &str) -> Vec<(Option<usize>, String)> {
    let faults = parse(text, vars).expect_err("faults");
    faults.0.into_iter().map(|f| (f.line, f.path)).collect()
}

#[test]
fn a_good_file_is_read_as_meant() {
    let config = parse(GOOD, vars).unwrap_or_else(|e| panic!("{e}"));
    let model = &config.catalogue.models["m"];
    let card = model.price.standard;
    assert_eq!(card.input.pico(), 1_005_000);
    assert_eq!(card.cache_read, card.input);
    let endpoint = &config.catalogue.endpoints[0];
    assert_eq!((endpoint.name.as_str(), endpoint.provider.base.path.as_str()), ("p/native", "/v1"));
    assert_eq!(endpoint.provider.credentials[0].held().secret.expose(), "prov-key");
    assert_eq!(config.accounts[0].balance.nano(), 1_500_000_000);
    assert!(!format!("{config:?}").contains("prov-key"), "secrets never print");
}

#[test]
fn all_faults_are_reported_at_once_with_line_and_path() {
    let text = GOOD
        .replace("admin: 127.0.0.1:9090", "admin: nowhere")
        .replace("\"1.005\"", "\"-1\"")
        .replace("provider: p,", "provider: q,")
        .replace("balance: \"1.50\"", "balance: \"1.0000000001\"");
    assert_eq!(
        faults(&text),
        [
            (Some(2), "listen.admin".to_owned()),
            (Some(8), "models.m.price.input".to_owned()),
            (Some(10), "models.m.routes[0].provider".to_owned()),
            (Some(13), "bootstrap.accounts.a.balance".to_owned()),
        ]
    );
}

#[test]
fn unknown_keys_wrong_kinds_and_missing_keys_come_together() {
    let text = GOOD
        .replace("embedded: { path: ./data }", "embeded: { path: ./data }")
        .replace("context: 1000", "context: many")
        .replace("output: 10 }", "}");
    let paths: Vec<_> = faults(&text).into_iter().map(|(_, path)| path).collect();
    for path in ["store.embeded", "models.m.limits.context", "models.m.price"] {
        assert!(paths.iter().any(|p| p == path), "{path} in {paths:?}");
    }
}

#[test]
fn a_fleet_needs_redis_postgres_and_a_folder_and_nothing_beside_them() {
    let with = |store: &str| GOOD.replace("embedded: { path: ./data }", store);
    let postgres = "postgres: { url: postgres://u:sesame@db/t }";
    let redis = "redis: { urls: [\"redis://:sesame@r:6379\"] }";
    let good = with(&format!("path: ./node, {redis}, {postgres}"));
    let config = parse(&good, vars).unwrap_or_else(|e| panic!("{e}"));
    let Store::Fleet(fleet) = &config.store else { panic!("{:?}", config.store) };
    assert_eq!((config.data.as_path(), fleet.redis.timeout), (Path::new("./node"), REDIS_TIMEOUT_MAX));
    assert!(!format!("{config:?}").contains("sesame"), "passwords never print");
    for (store, path) in [
        (format!("path: ./node, {redis}"), "store"),
        (format!("{redis}, {postgres}"), "store.path"),
        (format!("embedded: {{ path: ./data }}, {postgres}"), "store"),
        (format!("path: d, {postgres}, redis: {{ urls: [] }}"), "store.redis.urls"),
        (format!("path: d, {postgres}, redis: {{ urls: [\"http://r\"] }}"), "store.redis.urls[0]"),
        (
            format!("path: d, {postgres}, redis: {{ urls: [\"redis://r\"], timeout: 51ms }}"),
            "store.redis.timeout",
        ),
        (
            format!("path: d, {postgres}, redis: {{ urls: [\"redis://r\"], slot_lease: 1s }}"),
            "store.redis.slot_lease",
        ),
        (
            format!("path: d, {postgres}, redis: {{ urls: [\"redis://r\"], mode: sentinel }}"),
            "store.redis.primary",
        ),
        (format!("path: d, {redis}, postgres: {{ url: mysql://db }}"), "store.postgres.url"),
    ] {
        let paths: Vec<_> = faults(&with(&store)).into_iter().map(|(_, path)| path).collect();
        assert_eq!(paths, [path], "{store}");
    }
}

#[test]
fn only_a_node_of_a_fleet_may_leave_its_catalogue_out_and_only_as_a_whole() {
    let fleet = "store: { path: d, redis: { urls: [\"redis://r\"] }, postgres: { url: postgres://p/t } }\n";
    let listen = "listen: { http: 127.0.0.1:8080, admin: 127.0.0.1:9090 }\n";
    let bootstrap = "bootstrap: { accounts: { a: { keys: [ { key: sk-test-alpha, models: [m] } ] } } }\n";
    let config = parse(&format!("{listen}{fleet}{bootstrap}"), vars).unwrap_or_else(|e| panic!("{e}"));
    assert!(config.catalogue_of_fleet && config.catalogue.models.is_empty());
    let said = |text: &str| parse(text, vars).expect_err("faults").to_string();
    let models = "models: {}\n";
    assert!(said(&format!("{listen}{fleet}{models}")).contains("`providers` is missing"));
    let embedded = format!("{listen}store: {{ embedded: {{ path: d }} }}\n");
    for name in ["`providers` is missing", "`models` is missing"] {
        assert!(said(&embedded).contains(name));
    }
}

#[test]
fn a_price_written_as_a_float_is_refused_rather_than_rounded() {
    let text = GOOD.replace("\"1.005\"", "1.005");
    assert!(faults(&text).contains(&(Some(8), "models.m.price.input".to_owned())));
}

#[test]
fn a_config_prints_no_secret() {
    let config = parse(GOOD, vars).unwrap_or_else(|e| panic!("{e}"));
    let printed = format!("{config:?} {config:#?}");
    assert!(printed.contains("host.example") && printed.contains("Secret(…)"), "{printed}");
    for secret in ["prov-key", "sk-test-alpha"] {
        assert!(!printed.contains(secret), "{printed}");
    }
}

#[test]
fn an_upstream_that_may_never_be_called_is_a_fault_and_a_private_one_is_meant() {
    let at = |base: &str| GOOD.replace("https://host.example/v1/", base);
    for base in [
        "http://169.254.169.254/v1",
        "http://[fe80::1]/v1",
        "http://[fd00:ec2::254]/v1",
        "http://100.100.100.200/",
        "http://[::ffff:169.254.169.254]/",
        "http://metadata.google.internal/computeMetadata",
        "http://0.0.0.0:8000/v1",
    ] {
        let faults = parse(&at(base), vars).expect_err(base);
        assert_eq!(faults.0[0].path, "providers.p.base_url", "{base}");
        assert!(faults.to_string().contains("never called"), "{base}: {faults}");
    }
    let private = |text: &str| {
        parse(text, vars).unwrap_or_else(|e| panic!("{text}: {e}")).catalogue.endpoints[0].provider.private
    };
    for (base, meant) in [
        ("http://10.0.0.7:8000/v1", true),
        ("http://vllm:8000/v1", true),
        ("https://api.example.com/v1", false),
    ] {
        assert_eq!(private(&at(base)), meant, "{base}");
    }
    let said =
        at("https://api.example.com/v1").replace("dialect: openai,", "dialect: openai, private: true,");
    assert!(private(&said));
}

#[test]
fn an_upstream_is_named_in_heads_as_heads_want_it() {
    for (base, host, authority) in [
        ("https://api.example.com/v1", "api.example.com", "api.example.com"),
        ("https://api.example.com:443", "api.example.com", "api.example.com"),
        ("http://api.example.com:443", "api.example.com", "api.example.com:443"),
        ("http://10.0.0.7:8000/v1", "10.0.0.7", "10.0.0.7:8000"),
        ("http://[fd00::7]/v1", "fd00::7", "[fd00::7]"),
        ("https://[fd00::7]:8443/v1", "fd00::7", "[fd00::7]:8443"),
    ] {
        let config = parse(&GOOD.replace("https://host.example/v1/", base), vars).expect(base);
        let found = &config.catalogue.endpoints[0].provider.base;
        assert_eq!((found.host.as_str(), found.authority.as_str()), (host, authority), "{base}");
    }
}

#[test]
fn one_model_may_have_routes_of_both_dialects() {
    let mixed = GOOD
        .replace("models:\n", "  q: { dialect: anthropic, base_url: \"http://h\" }\nmodels:\n")
        .replace("routes: [ ", "routes: [ { provider: q }, ");
    let speaks = |text: &str| {
        let catalogue = parse(text, vars).unwrap_or_else(|e| panic!("{e}")).catalogue;
        [Dialect::OpenAi, Dialect::Anthropic].map(|d| catalogue.speaks(&catalogue.models["m"], d))
    };
    assert_eq!((speaks(&mixed), speaks(GOOD)), ([true, true], [true, false]));
}

#[test]
fn an_alias_stands_for_the_model_at_the_end_of_its_chain() {
    let with = |aliases: &str| format!("{GOOD}aliases: {{ {aliases} }}\n");
    let config = parse(&with("new: old, old: m"), vars).unwrap_or_else(|e| panic!("{e}"));
    let name = |alias: &str| config.catalogue.model(alias).map(|model| model.name.clone());
    assert_eq!((name("new"), name("old"), name("none")), (Some("m".into()), Some("m".into()), None));
    for (aliases, word) in [
        ("a: b, b: a", "cycle"),
        ("a: a", "cycle"),
        ("a: b, b: c, c: b", "cycle"),
        ("a: nobody", "nobody"),
        ("m: m", "already"),
    ] {
        let faults = parse(&with(aliases), vars).expect_err(aliases).to_string();
        assert!(faults.contains(word) && faults.contains("aliases."), "{aliases}: {faults}");
    }
}

#[test]
fn a_provider_serves_what_it_names_or_all_of_its_dialect() {
    let served = |text: &str| -> Vec<&'static str> {
        let catalogue = parse(text, vars).unwrap_or_else(|e| panic!("{e}")).catalogue;
        let model = &catalogue.models["m"];
        let served = Operation::ALL.into_iter().filter(|operation| catalogue.serves(model, *operation));
        served.map(Operation::word).collect()
    };
    let named =
        |surfaces: &str| GOOD.replace("dialect: openai", &format!("dialect: openai, surfaces: {surfaces}"));
    assert_eq!(served(GOOD), ["chat", "completions", "responses", "embeddings"]);
    assert_eq!(served(&named("[chat, embeddings]")), ["chat", "embeddings"]);
    assert_eq!(served(&GOOD.replace("output: 100", "output: 0")), ["embeddings"]);
    for wrong in ["[]", "[messages]", "[chat, count_tokens]"] {
        let path = "providers.p.surfaces".to_owned();
        assert_eq!(faults(&named(wrong)), [(Some(5), path)], "{wrong}");
    }
    let mute = named("[chat]").replace("output: 100", "output: 0");
    assert_eq!(faults(&mute), [(Some(10), "models.m.routes".to_owned())]);
    let unknown = parse(&named("[chat, rerank]"), vars).expect_err("a fault").to_string();
    assert!(unknown.contains("rerank") && unknown.contains("embeddings"), "{unknown}");
}

#[test]
fn callers_may_connect_by_http_by_https_and_from_inside() {
    let listens = |listen: &str| {
        let text = GOOD.replace("http: 127.0.0.1:8080, ", listen);
        parse(&text, vars).map(|config| config.listen.callers)
    };
    let tls = "https: { address: 127.0.0.1:8443, cert_file: c, key_file: k }, ";
    let only_tls = listens(tls).unwrap();
    assert_eq!((only_tls.len(), only_tls[0].field, only_tls[0].h2c), (1, "listen.https", false));
    let all = listens(&format!(
        "http: {{ address: 127.0.0.1:8080, proxy_protocol: {{ mode: require, trusted: [10.1.2.3/8] }} }}, {tls}\
             internal: {{ address: 127.0.0.1:8081, h2c: true }}, "
    ));
    let all = all.unwrap();
    let trusted = all[0].proxy_protocol.as_ref().unwrap();
    assert!(trusted.required && trusted.trusted[0].to_string() == "10.0.0.0/8");
    assert!(all[1].tls.is_some() && all[2].tls.is_none() && all[2].h2c);
}

#[test]
fn listeners_that_cannot_be_meant_are_refused() {
    let with = |listen: &str| faults(&GOOD.replace("http: 127.0.0.1:8080, ", listen));
    let paths = |listen: &str| with(listen).into_iter().map(|(_, path)| path).collect::<Vec<_>>();
    assert_eq!(paths(""), ["listen"]);
    assert_eq!(paths("internal: { address: 127.0.0.1:8081 }, "), ["listen"], "nobody outside can call");
    assert_eq!(paths("http: 127.0.0.1:9090, "), ["listen.http"], "the admin port's");
    assert_eq!(
        paths("https: { address: x, cert_file: '', key_file: k }, "),
        ["listen.https", "listen.https.cert_file"]
    );
    let trusting = |list: &str| {
        paths(&format!(
            "http: {{ address: 127.0.0.1:1, proxy_protocol: {{ mode: accept, trusted: {list} }} }}, "
        ))
    };
    assert_eq!(trusting("[]"), ["listen.http.proxy_protocol.trusted"]);
    assert_eq!(trusting("[ten]"), ["listen.http.proxy_protocol.trusted[0]"]);
}

#[test]
fn a_key_of_two_accounts_is_refused() {
    let text = format!("{GOOD}    b: {{ keys: [ {{ key: sk-test-alpha }} ] }}\n");
    assert_eq!(faults(&text).len(), 1);
}
