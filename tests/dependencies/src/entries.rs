//! Functions of the device that C calls: no panic leaves one, as that would end the application.
//! The scan finds functions without a guard, not code beside the guard of a function that has one.

use crate::modules;

/// The sources whose functions are checked.
const SOURCES: &str = "crates/softverbs/src/";

/// The functions of `entry` and `cm::guard` that run a body and catch its panic.
const GUARDS: &[&str] = &["errno_of", "guard", "pointer", "status", "void"];

/// The modules of these functions.
const MODULES: &[&str] = &["entry::", "guard::"];

/// Functions without a guard, by file: those whose body has no panic.
const WITHOUT: &[(&str, &[&str])] = &[
    // the count of an object, under its C mutex
    ("abi/context.rs", &["ack_async_event"]),
    (
        // an address of the device's structure, `free(3)`, constants
        "abi/device.rs",
        &[
            "free_device_list",
            "get_device_name",
            "get_device_index",
            "fork_init",
            "is_fork_initialized",
        ],
    ),
    (
        // texts by `match`
        "abi/names.rs",
        &[
            "wc_status_str",
            "event_type_str",
            "node_type_str",
            "port_state_str",
        ],
    ),
    // a field
    ("abi/qp.rs", &["qp_to_qp_ex"]),
    // 0 or an errno
    ("abi/query.rs", &["get_pkey_index"]),
    // a constant or 0
    ("abi/softdv.rs", &["max_atomic"]),
    // fields of the id
    ("cm/bind.rs", &["rdma_get_src_port", "rdma_get_dst_port"]),
    // a text by `match`
    ("cm/event.rs", &["rdma_event_str"]),
    (
        // copies of fields of one completion, constants, the release of a flag
        "cq/extended.rs",
        &[
            "end_poll",
            "read_opcode",
            "read_vendor_err",
            "read_wc_flags",
            "read_byte_len",
            "read_imm_data",
            "read_qp_num",
            "read_src_qp",
            "read_slid",
            "read_sl",
            "read_completion_ts",
        ],
    ),
    // it catches the panic of its object's body itself
    ("sys/thread.rs", &["main"]),
];

/// A function with a body.
struct Function<'a> {
    name: &'a str,
    line: usize,
    body: &'a str,
    is_c: bool,
}

/// The functions for C that call neither a guard nor a function of their file that calls one, and
/// the exceptions that are not needed.
#[must_use]
pub fn unguarded(path: &str, text: &str) -> Vec<String> {
    let Some(file) = path.strip_prefix(SOURCES) else {
        return Vec::new();
    };
    if modules::is_test(path) {
        return Vec::new();
    }
    let code = modules::code_without_tests(text);
    let functions = functions(&code);
    let mut guarded: Vec<&str> = Vec::new();
    loop {
        let calls = |of: &&Function<'_>| calls_one_of(of.body, &guarded);
        let new = functions.iter().filter(|of| !guarded.contains(&of.name));
        let new: Vec<&str> = new.filter(calls).map(|of| of.name).collect();
        if new.is_empty() {
            break;
        }
        guarded.extend(new);
    }
    let exceptions = WITHOUT.iter().find(|(of, _)| *of == file);
    let exceptions = exceptions.map_or(&[][..], |(_, names)| names);
    let without = |of: &&Function<'_>| of.is_c && !guarded.contains(&of.name);
    let mut out = Vec::new();
    for of in functions.iter().filter(without) {
        if !exceptions.contains(&of.name) {
            let (line, name) = (of.line, of.name);
            out.push(format!(
                "{path}:{line}: `{name}` is called by C without a guard"
            ));
        }
    }
    for name in exceptions {
        if !functions.iter().filter(without).any(|of| of.name == *name) {
            out.push(format!("{path}: `{name}` needs no exception"));
        }
    }
    out
}

/// The functions of a text of code, also those inside others.
fn functions(code: &str) -> Vec<Function<'_>> {
    let mut out = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let own = code[..at].chars().next_back();
        if own.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &code[at + 3..];
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        let name = &rest[..end.unwrap_or(rest.len())];
        let Some(body) = body(rest) else { continue };
        out.push(Function {
            name,
            line: code[..at].matches('\n').count() + 1,
            body,
            // the name of the calling convention is a literal, which the code does not have
            is_c: code[..at].trim_end().ends_with("extern"),
        });
    }
    out
}

/// The text between the braces of a function; `None`: a declaration.
fn body(rest: &str) -> Option<&str> {
    let mut brackets = 0;
    let begin = rest.find(|c| {
        match c {
            '[' => brackets += 1,
            ']' => brackets -= 1,
            _ => {}
        }
        // the `;` of the type of an array ends no declaration
        c == '{' || c == ';' && brackets == 0
    })?;
    let body = rest[begin..].strip_prefix('{')?;
    let mut depth = 1;
    for (at, c) in body.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some(&body[..at]);
        }
    }
    None
}

/// Whether a body calls a guard or one of the functions `others` of its file. Methods and functions
/// of other modules do not count.
fn calls_one_of(body: &str, others: &[&str]) -> bool {
    let names = GUARDS.iter().chain(others);
    names.into_iter().any(|name| {
        body.match_indices(name).any(|(at, _)| {
            let before = &body[..at];
            let after = &body[at + name.len()..];
            let whole = !before.ends_with(|c: char| c.is_alphanumeric() || "_.".contains(c));
            let local = !before.ends_with("::") || MODULES.iter().any(|of| before.ends_with(of));
            whole && local && after.starts_with('(')
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(text: &str) -> usize {
        unguarded("crates/softverbs/src/abi/x.rs", text).len()
    }

    #[test]
    fn a_function_for_c_without_a_guard_is_seen() {
        for planted in [
            "unsafe extern \"C\" fn f(a: u32) -> u32 { g(a) }\nfn g(a: u32) -> u32 { a }",
            "extern \"C\" fn f() { self.status() }",
            "extern \"C\" fn f() { other::status(|| Ok(())) }",
            "extern \"C\" fn f() { // status(\n}",
            "extern \"C\" fn f(a: [u8; 4]) { g(a) }",
            "extern \"C\" fn f() {}\nextern \"C\" fn g() { guard(|| Ok(())); }",
        ] {
            assert_eq!(seen(planted), 1, "{planted}");
        }
    }

    #[test]
    fn a_guard_may_be_in_a_function_of_the_file() {
        for fine in [
            "extern \"C\" fn f() -> c_int { status(|| Ok(())) }",
            "extern \"C\" fn f() -> c_int { crate::entry::errno_of(|| 0) }",
            "extern \"C\" fn f() { a(1) }\nfn a(n: u8) { b(n) }\nfn b(n: u8) { guard(|| Ok(n)); }",
            "struct S { f: unsafe extern \"C\" fn(u32) -> u32 }",
            "unsafe extern \"C\" { fn f(); }",
            "#[cfg(test)]\nmod tests {\nextern \"C\" fn f() {}\n}",
        ] {
            assert_eq!(seen(fine), 0, "{fine}");
        }
    }

    #[test]
    fn an_exception_that_is_not_needed_is_seen() {
        let path = "crates/softverbs/src/cm/event.rs";
        assert_eq!(unguarded(path, "").len(), 1);
        assert_eq!(
            unguarded(path, "extern \"C\" fn rdma_event_str() {}"),
            [""; 0]
        );
    }
}
