//! The rules, applied to the tree.

use dependency_rules::{arrows, commands, conformance, entries, modules, paths, sources, tree};
use serde_json::Value;
use std::process::Command;

fn kept(breaches: &[String]) {
    assert!(breaches.is_empty(), "\n{}", breaches.join("\n"));
}

fn over_sources(rule: impl Fn(&str, &str) -> Vec<String>) {
    let files = tree::sources();
    assert!(
        files.iter().any(|(path, _)| path == "src/lib.rs"),
        "the tree was not found"
    );
    kept(
        &files
            .iter()
            .flat_map(|(path, text)| rule(path, text))
            .collect::<Vec<_>>(),
    );
}

fn metadata() -> Value {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let args = [
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
        "--offline",
        "--locked",
    ];
    let out = Command::new(cargo)
        .args(args)
        .current_dir(tree::top())
        .output()
        .expect("cargo runs");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    serde_json::from_slice(&out.stdout).expect("cargo metadata prints JSON")
}

#[test]
fn dependencies_point_one_way() {
    let metadata = metadata();
    let names: Vec<_> = metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .map(|package| package["name"].clone())
        .collect();
    assert!(
        names.contains(&Value::from("weft")) && names.contains(&Value::from("weft-fi")),
        "{names:?}"
    );
    kept(&arrows::breaches(&metadata));
}

#[test]
fn every_dependency_has_its_reason() {
    let page = std::fs::read_to_string(tree::top().join("docs/dependencies.md"))
        .expect("docs/dependencies.md");
    kept(&arrows::undocumented(&metadata(), &page));
}

#[test]
fn modules_use_only_those_below() {
    over_sources(modules::upward);
}

#[test]
fn every_module_of_a_crate_with_layers_has_one() {
    let files = tree::sources();
    kept(&modules::without_layer(
        files.iter().map(|(path, _)| path.as_str()),
    ));
}

#[test]
fn only_the_verbs_module_calls_verbs() {
    over_sources(sources::verb_calls);
}

#[test]
fn only_the_provider_sees_libfabric() {
    over_sources(sources::libfabric_mentions);
}

#[test]
fn no_panic_of_the_device_reaches_c() {
    over_sources(entries::unguarded);
}

#[test]
fn every_unsafe_has_its_reason() {
    over_sources(sources::unsafe_without_reason);
}

#[test]
fn the_environment_is_read_where_its_variables_are_listed() {
    over_sources(sources::environment_reads);
}

#[test]
fn nothing_is_marked_for_later() {
    over_sources(sources::left_open);
}

#[test]
fn no_path_of_a_developers_machine() {
    kept(
        &tree::files()
            .iter()
            .flat_map(|(path, text)| paths::breaches(path, text))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn every_command_of_the_pages_exists() {
    let makefile = std::fs::read_to_string(tree::top().join("Makefile")).expect("Makefile");
    let pages = tree::files()
        .into_iter()
        .filter(|(path, _)| path.ends_with(".md"));
    kept(
        &pages
            .flat_map(|(path, text)| commands::breaches(&path, &text, &makefile))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn every_sentence_has_its_test() {
    let page = std::fs::read_to_string(tree::top().join("docs/conformance.md"))
        .expect("docs/conformance.md");
    kept(&conformance::breaches(&page, &tree::files()));
}
