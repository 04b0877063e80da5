//! Which module of a crate may use which: the layers that the design and the module heads draw.

use crate::lexer;

/// The engine's sources.
const ENGINE: &str = "src/";

/// The layers of the engine, the lowest first. A module uses those of lower layers; modules of one
/// layer do not use each other, except as [`BESIDE`] has it.
const ENGINE_LAYERS: &[&[&str]] = &[
    &[
        "auth", "chunks", "errno", "flags", "hash", "log", "pages", "sync",
    ],
    // no device, no lock, no I/O
    &["av", "matching"],
    &["verbs"],
    &["wire", "xrc"],
    &["mr", "queue"],
    &["conn", "initiator"],
    &["eq"],
    &["domain"],
    &["msg", "rdm"],
];

/// Uses within one layer: the first module uses the second.
const BESIDE: &[(&str, &str)] = &[
    ("auth", "errno"),
    ("chunks", "pages"),
    ("log", "errno"),
    // a region has an event cell, and counters that follow it
    ("mr", "queue"),
];

/// Files of a root, which may use all of its modules.
const ROOTS: &[&str] = &["lib", "mod"];

/// Modules without a layer: targets of fuzzing, models of loom, tests and what they share.
const OUTSIDE: &[&str] = &["fuzz", "models", "testing", "tests"];

/// The provider's sources.
const PROVIDER: &str = "provider/src/";

/// The layers of the provider, as [`ENGINE_LAYERS`].
const PROVIDER_LAYERS: &[&[&str]] = &[
    &["addr", "identity"],
    &["ffi"],
    &["devices", "mr_attr", "opened", "poll_members"],
    &["data", "getinfo"],
    // objects that others refer to; their tables of calls are above all that the tables name
    &["connreq", "domain", "fabric"],
    &["cq", "monitor", "pep", "xrcd"],
    &["cntr", "eq"],
    &["av"],
    &["ep"],
    &["mr", "poll"],
    &["pep_ops", "weft_mr_ops"],
    &["domain_ops"],
    &["fabric_ops"],
    &["provider"],
    &["exports"],
];

/// Uses against the layers of the provider: the first module uses the second.
const PROVIDER_EXCEPTIONS: &[(&str, &str)] = &[
    // the structures of include/weft.h, which is generated from exports
    ("weft_mr_ops", "exports"),
];

/// The sources of the device in user space.
const SOFTVERBS: &str = "crates/softverbs/src/";

/// The layers of the device, as [`ENGINE_LAYERS`].
const SOFTVERBS_LAYERS: &[&[&str]] = &[
    &["environment", "limits", "log", "sys"],
    &["entry", "gid", "sync"],
    // the shared memory of a process, and how another process asks for files of it
    &["agent", "repeat", "segment"],
    &["dm", "key", "registry", "signal"],
    &["hazard", "receive_ring", "ring"],
    &["peer"],
    // memory of this process, and access to that of a peer
    &["region"],
    &["mw"],
    // this process: all the above, and the lists of the objects below
    &["process"],
    &["events"],
    &["object"],
    &["cq", "xrc"],
    &["delivery"],
    &["srq"],
    &["qp"],
    &["agent_thread"],
    // entry points
    &["abi", "cm"],
];

/// Uses against the layers of the device: the first module uses the second. The process has the
/// lists of these objects, and its progress calls them.
const SOFTVERBS_EXCEPTIONS: &[(&str, &str)] = &[
    ("process", "agent_thread"),
    ("process", "cq"),
    ("process", "qp"),
    ("process", "srq"),
    ("process", "xrc"),
];

/// The connection manager of the device.
const CM: &str = "crates/softverbs/src/cm/";

/// The layers of the connection manager, as [`ENGINE_LAYERS`].
const CM_LAYERS: &[&[&str]] = &[
    &["device", "diag", "guard", "sock", "wire"],
    &["address", "conversation", "redial"],
    &["local"],
    // an id has a state, the state a channel, the channel events, and these have ids
    &["channel", "event", "id", "state"],
    // steps of an id: those that its own side begins, and those that the peer causes
    &["dial", "qp"],
    &["service"],
    &["deliver", "progress"],
    &["get_event"],
    &["synchronous"],
    // entry points
    &["bind", "connect", "lifetime"],
];

/// Uses within the layer of the structures.
const CM_STRUCTURES: &[Use] = &[
    ("channel", "event"),
    ("channel", "id"),
    ("event", "id"),
    ("id", "channel"),
    ("id", "state"),
    ("state", "channel"),
    ("state", "event"),
    ("state", "id"),
];

/// The queue pairs of the device.
const QP: &str = "crates/softverbs/src/qp/";

/// The layers of the queue pairs' files, as [`ENGINE_LAYERS`]. All of them add methods to the
/// structures of `mod.rs`; here are the uses of their own structures and functions.
const QP_LAYERS: &[&[&str]] = &[
    &[
        "agent_request",
        "copy_list",
        "counts",
        "drain",
        "pending_word",
        "recv",
        "request",
        "state",
    ],
    &["copies", "modify", "remote_qp"],
    &["ring_sends"],
    &["access", "fail", "own_ring", "push", "waiting", "xrc_send"],
    &["atomic", "elements", "execute"],
    &["datagram", "pending", "post", "send", "window"],
    &["extended", "fast_path", "pull"],
    &["object"],
    &["xrc_target"],
];

/// `fi_getinfo`.
const GETINFO: &str = "provider/src/getinfo/";

/// The layers of `fi_getinfo`, as [`ENGINE_LAYERS`].
const GETINFO_LAYERS: &[&[&str]] = &[
    &["addresses", "ep_type", "hints", "traffic_class"],
    &["layered", "offer", "resolve"],
    &["mr_mode"],
    &["negotiate"],
    &["build", "instances", "refusal"],
];

/// The calls that transfer data.
const DATA: &str = "provider/src/data/";

/// The layers of these calls, as [`ENGINE_LAYERS`].
const DATA_LAYERS: &[&[&str]] = &[
    &["traits"],
    &["atomic_call", "msg", "rma", "tagged"],
    &["atomic"],
];

/// The endpoints and shared receive contexts.
const EP: &str = "provider/src/ep/";

/// The layers of the endpoints' files, as [`ENGINE_LAYERS`].
const EP_LAYERS: &[&[&str]] = &[
    &["bind", "common", "op_flags"],
    &["control", "msg_ep", "msg_srx", "rdm_ep", "rdm_srx"],
    &["cm", "msg_atomic", "opt", "rdm_atomic", "rdm_tables"],
    &["msg_ep_ops", "query_atomic", "rdm_ep_ops", "rdm_srx_ops"],
    &["open"],
];

/// RDM endpoints.
const RDM: &str = "src/rdm/";

/// The layers of RDM endpoints, as [`ENGINE_LAYERS`].
const RDM_LAYERS: &[&[&str]] = &[
    &["slab"],
    &["core"],
    &[
        "counts",
        "iov",
        "limits",
        "listening",
        "number_map",
        "packet_memory",
        "table_keys",
        "vector",
    ],
    &["operations", "receive"],
    &["recv"],
    &["config", "long"],
    &["receives"],
    &["completions", "search"],
    &["rma"],
    &["link"],
    // circuits
    &["xrc"],
    &["step"],
    &["executor"],
    &["shared"],
    &["context", "rings"],
    &["cq_source"],
    &["endpoint"],
    &["process_end"],
];

/// Uses against the layers of RDM endpoints. The state of an endpoint is one structure, on which
/// these modules have methods.
const RDM_EXCEPTIONS: &[Use] = &[
    // the state has its context, its sources and the pace of its progress
    ("shared", "context"),
    ("shared", "cq_source"),
    ("shared", "rings"),
];

/// A module of a folder that may use few others, whatever the layers of the folder permit.
struct Closed {
    /// The folder, as [`Crate::sources`].
    sources: &'static str,
    /// The path of the folder's module in the crate.
    root: &'static str,
    module: &'static str,
    /// What it may use of the folder.
    beside: &'static [&'static str],
    /// What it may use of the crate.
    below: &'static [&'static str],
}

const CLOSED: &[Closed] = &[Closed {
    // the protocol's state machine: no queue pair, no lock, no clock
    sources: RDM,
    root: "crate::rdm::",
    module: "core",
    beside: &["slab"],
    below: &["errno", "verbs", "wire"],
}];

impl Closed {
    /// The names that the code of a file of the module uses and must not use, with their lines.
    fn forbidden(&self, path: &str, code: &str) -> Vec<(usize, String)> {
        if place_in(path, self.sources) != Some(self.module) {
            return Vec::new();
        }
        let beside = used(code, self.root, depth(path, self.sources)).into_iter();
        let beside = beside.filter(|(_, name)| {
            // the folder's own module names what the others export
            name != self.module && !self.beside.contains(&name.as_str())
        });
        let below = used(code, "crate::", depth(path, "src/")).into_iter();
        let folder = self.root.trim_end_matches("::").rsplit("::").next();
        let below = below.filter(|(_, name)| {
            Some(name.as_str()) != folder && !self.below.contains(&name.as_str())
        });
        beside.chain(below).collect()
    }
}

/// A module and another one that it uses.
type Use = (&'static str, &'static str);

/// The layers of one crate, or of one folder of it.
struct Crate {
    /// The folder of its sources, with a slash behind it.
    sources: &'static str,
    /// The path of the folder's module in the crate.
    root: &'static str,
    layers: &'static [&'static [&'static str]],
    /// Uses that the layers do not forbid.
    exceptions: &'static [Use],
}

const CRATES: &[Crate] = &[
    Crate {
        sources: ENGINE,
        root: "crate::",
        layers: ENGINE_LAYERS,
        exceptions: BESIDE,
    },
    Crate {
        sources: PROVIDER,
        root: "crate::",
        layers: PROVIDER_LAYERS,
        exceptions: PROVIDER_EXCEPTIONS,
    },
    Crate {
        sources: SOFTVERBS,
        root: "crate::",
        layers: SOFTVERBS_LAYERS,
        exceptions: SOFTVERBS_EXCEPTIONS,
    },
    Crate {
        sources: CM,
        root: "crate::cm::",
        layers: CM_LAYERS,
        exceptions: CM_STRUCTURES,
    },
    Crate {
        sources: QP,
        root: "crate::qp::",
        layers: QP_LAYERS,
        exceptions: &[],
    },
    Crate {
        sources: RDM,
        root: "crate::rdm::",
        layers: RDM_LAYERS,
        exceptions: RDM_EXCEPTIONS,
    },
    Crate {
        sources: GETINFO,
        root: "crate::getinfo::",
        layers: GETINFO_LAYERS,
        exceptions: &[],
    },
    Crate {
        sources: DATA,
        root: "crate::data::",
        layers: DATA_LAYERS,
        exceptions: &[],
    },
    Crate {
        sources: EP,
        root: "crate::ep::",
        layers: EP_LAYERS,
        exceptions: &[],
    },
];

impl Crate {
    fn layer(&self, module: &str) -> Option<usize> {
        let mut layers = self.layers.iter();
        layers.position(|layer| layer.contains(&module))
    }

    /// Whether `module` must not use `used`.
    fn forbids(&self, module: &str, used: &str) -> bool {
        match (self.layer(module), self.layer(used)) {
            (Some(of), Some(to)) => of <= to && !self.exceptions.contains(&(module, used)),
            _ => false,
        }
    }
}

/// The code of a source up to the module of its unit tests.
pub(crate) fn code_without_tests(text: &str) -> String {
    let lines = lexer::lines(text);
    let ends = lines.windows(2).position(|pair| {
        pair[0].code.trim() == "#[cfg(test)]" && pair[1].code.trim_start().starts_with("mod ")
    });
    let lines = &lines[..ends.unwrap_or(lines.len())];
    let code: Vec<&str> = lines.iter().map(|line| line.code.as_str()).collect();
    code.join("\n")
}

/// The uses of modules above its own in a file. Tests may use what they like.
#[must_use]
pub fn upward(path: &str, text: &str) -> Vec<String> {
    if is_test(path) {
        return Vec::new();
    }
    let code = code_without_tests(text);
    let mut out = Vec::new();
    for (of, module) in places(path) {
        let uses = used(&code, of.root, depth(path, of.sources)).into_iter();
        let upward = uses.filter(|(_, used)| used != module && of.forbids(module, used));
        out.extend(upward.map(|(line, used)| {
            format!("{path}:{line}: uses `{used}`, a module above `{module}`")
        }));
    }
    for of in CLOSED {
        let uses = of.forbidden(path, &code).into_iter();
        out.extend(uses.map(|(line, used)| {
            let module = of.module;
            format!("{path}:{line}: uses `{used}`, which `{module}` must not know")
        }));
    }
    out
}

/// Modules of the crates with layers that have none. Each of `paths` is a file's.
#[must_use]
pub fn without_layer<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let modules = paths.into_iter().flat_map(places);
    let mut out: Vec<String> = modules
        .filter(|(_, module)| !ROOTS.contains(module) && !OUTSIDE.contains(module))
        .filter(|(of, module)| of.layer(module).is_none())
        .map(|(of, module)| format!("{}{module}: a module that has no layer", of.sources))
        .collect();
    out.sort();
    out.dedup();
    out
}

/// The crate and the folder with layers that a file belongs to, and its module in each.
fn places(path: &str) -> impl Iterator<Item = (&'static Crate, &str)> {
    let crates = CRATES.iter();
    crates.filter_map(move |of| Some((of, place_in(path, of.sources)?)))
}

/// The module directly below `sources` that a file belongs to.
fn place_in<'a>(path: &'a str, sources: &str) -> Option<&'a str> {
    let rest = path.strip_prefix(sources)?;
    let (first, _) = rest.split_once('/').unwrap_or((rest, ""));
    Some(first.strip_suffix(".rs").unwrap_or(first))
}

/// How many `super::` lead from a file to the crate's root.
fn depth(path: &str, sources: &str) -> usize {
    let rest = path.strip_prefix(sources).unwrap_or(path);
    rest.split('/').filter(|part| *part != "mod.rs").count()
}

pub(crate) fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/models.rs")
}

/// The modules that code names by a path from `root`, with their lines: by the root's own path, or
/// by `depth` times `super::`; alone, or in a group of a `use`.
fn used(code: &str, root: &str, depth: usize) -> Vec<(usize, String)> {
    let up = "super::".repeat(depth);
    let mut out = Vec::new();
    for root in [root, up.as_str()] {
        for (at, _) in code.match_indices(root) {
            let before = &code[..at];
            let continued = before.ends_with(|c: char| c.is_alphanumeric() || "_$:".contains(c));
            if root.is_empty() || continued {
                continue;
            }
            let line = before.matches('\n').count() + 1;
            let rest = &code[at + root.len()..];
            out.extend(first_names(rest).into_iter().map(|name| (line, name)));
        }
    }
    out
}

/// The first names of the paths that follow a root: one, or several in a group.
fn first_names(rest: &str) -> Vec<String> {
    let mut out = Vec::new();
    let Some(group) = rest.strip_prefix('{') else {
        out.extend(name(rest));
        return out;
    };
    let (mut nested, mut starts) = (0, true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => nested += 1,
            '}' if nested == 0 => break,
            '}' => nested -= 1,
            ',' if nested == 0 => starts = true,
            c if starts && !c.is_whitespace() => {
                out.extend(name(&group[at..]));
                starts = false;
            }
            _ => {}
        }
    }
    out
}

/// The name that a text begins with.
fn name(text: &str) -> Option<String> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    let name = &text[..end.unwrap_or(text.len())];
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_of_a_module_above_is_seen() {
        let path = "crates/softverbs/src/qp/send.rs";
        assert_eq!(upward(path, "use crate::abi::Context;").len(), 1);
        assert_eq!(upward(path, "    let n = crate::cm::table();").len(), 1);
        assert_eq!(upward(path, "use crate::object::Context;"), [""; 0]);
        assert_eq!(upward(path, "// crate::abi"), [""; 0]);
        let file = "crates/softverbs/src/entry.rs";
        assert_eq!(upward(file, "use crate::object::Pd;").len(), 1);
        assert_eq!(
            upward(file, "#[cfg(test)]\nmod tests {\nuse crate::object::Pd;"),
            [""; 0]
        );
        assert_eq!(
            upward("crates/softverbs/src/abi/qp.rs", "use crate::qp;"),
            [""; 0]
        );
    }

    #[test]
    fn an_arrow_upward_in_the_engine_is_seen() {
        let seen = |path, text| upward(path, text).len();
        assert_eq!(
            seen("src/verbs/cm.rs", "use crate::wire::cm_data::CmData;"),
            1
        );
        assert_eq!(seen("src/mr/region.rs", "use crate::msg::Endpoint;"), 1);
        assert_eq!(
            seen("src/queue/cq.rs", "    crate::domain::Domain::open();"),
            1
        );
        assert_eq!(seen("src/conn/dial.rs", "use crate::eq::EventQueue;"), 1);
        assert_eq!(seen("src/conn/dial.rs", "use crate::initiator::Sq;"), 1);
        assert_eq!(seen("src/eq.rs", "use crate::domain::Domain;"), 1);
        assert_eq!(seen("src/msg/ep.rs", "use crate::conn::Connection;"), 0);
        assert_eq!(seen("src/mr/region.rs", "use crate::queue::Counter;"), 0);
        assert_eq!(seen("src/queue/cntr.rs", "use crate::mr::Region;"), 1);
        assert_eq!(
            seen(
                "src/mr/region.rs",
                "#[cfg(test)]\nmod tests {\nuse crate::msg::Endpoint;"
            ),
            0
        );
        assert_eq!(seen("src/mr/ops/tests.rs", "use crate::msg::Endpoint;"), 0);
    }

    #[test]
    fn an_arrow_upward_in_the_provider_is_seen() {
        let seen = |path, text| upward(path, text).len();
        assert_eq!(seen("provider/src/ffi/log.rs", "use crate::provider;"), 1);
        assert_eq!(
            seen("provider/src/ffi/param.rs", "use crate::getinfo::mr_mode;"),
            1
        );
        assert_eq!(
            seen(
                "provider/src/cq.rs",
                "use crate::{cntr, domain::Domain, domain_ops};"
            ),
            2
        );
        let object = "use crate::ep::msg_ep::Ep;";
        assert_eq!(seen("provider/src/data/msg.rs", object), 1);
        assert_eq!(seen("provider/src/ep/control.rs", object), 1);
        assert_eq!(seen("provider/src/ep/msg_ep_ops.rs", object), 0);
        let opening = "use crate::ep::rdm_ep_ops;";
        assert_eq!(seen("provider/src/ep/open.rs", opening), 0);
        assert_eq!(
            seen("provider/src/weft_mr_ops.rs", "use crate::exports;"),
            0
        );
        assert_eq!(seen("provider/src/mr.rs", "use crate::exports;"), 1);
    }

    #[test]
    fn an_arrow_is_seen_however_it_is_written() {
        let seen = |path, text| upward(path, text).len();
        let group =
            "use crate::{\n    errno::{self, Result},\n    msg::{Endpoint, wire},\n    eq,\n};";
        assert_eq!(seen("src/mr/region.rs", group), 2);
        assert_eq!(
            seen("src/mr/region.rs", "use super::super::msg::Endpoint;"),
            1
        );
        assert_eq!(seen("src/mr/mod.rs", "use super::msg::Endpoint;"), 1);
        assert_eq!(seen("src/eq.rs", "use super::msg::Endpoint;"), 1);
        assert_eq!(
            seen("src/mr/cache/mod.rs", "use super::super::msg::Endpoint;"),
            1
        );
        assert_eq!(
            seen("src/mr/ops/grant.rs", "use super::super::super::msg;"),
            1
        );
        assert_eq!(
            seen("src/mr/ops/grant.rs", "use super::super::msg;"),
            0,
            "it is mr::msg"
        );
        assert_eq!(
            seen("src/mr/region.rs", "$crate::msg!()"),
            0,
            "a macro of another crate"
        );
    }

    #[test]
    fn a_module_without_a_layer_is_seen() {
        let known = [
            "src/lib.rs",
            "src/fuzz.rs",
            "src/mr/region.rs",
            "provider/src/getinfo/mod.rs",
        ];
        assert_eq!(without_layer(known), [""; 0]);
        let seen = without_layer(["src/new/mod.rs", "src/new/more.rs", "src/other.rs"]);
        assert_eq!(seen.len(), 2, "{seen:?}");
        assert_eq!(without_layer(["provider/src/new.rs"]).len(), 1);
    }

    #[test]
    fn an_arrow_upward_in_softverbs_is_seen() {
        let seen = |path: &str, text| upward(&format!("{SOFTVERBS}{path}"), text).len();
        assert_eq!(seen("peer.rs", "use crate::region::Regions;"), 1);
        assert_eq!(seen("region/atomic.rs", "use crate::process::Process;"), 1);
        assert_eq!(seen("gid.rs", "use crate::process::MAX_NODES;"), 1);
        assert_eq!(seen("srq/xrc.rs", "use crate::qp::receives;"), 1);
        assert_eq!(
            seen("cq/channel.rs", "    crate::xrc::Domains::default();"),
            1
        );
        assert_eq!(
            seen("agent/client.rs", "use super::super::process::Process;"),
            1
        );
        assert_eq!(seen("abi/qp.rs", "use crate::{cm, qp};"), 1);
        assert_eq!(seen("process/progress.rs", "use crate::qp::Qp;"), 0);
        assert_eq!(seen("process/progress.rs", "use crate::object::Pd;"), 1);
        assert_eq!(seen("abi/qp.rs", "use crate::{gid, qp};"), 0);
    }

    #[test]
    fn an_arrow_upward_in_a_folder_is_seen() {
        let seen = |path: &str, text| upward(&format!("{CM}{path}"), text).len();
        assert_eq!(seen("progress.rs", "use super::connect;"), 1);
        assert_eq!(seen("progress.rs", "use super::{bind, dial};"), 1);
        assert_eq!(seen("progress.rs", "use crate::cm::connect::repeat;"), 1);
        assert_eq!(seen("progress.rs", "use super::super::abi::Context;"), 1);
        assert_eq!(
            seen("channel.rs", "        super::deliver::deliver(event);"),
            1
        );
        assert_eq!(seen("conversation.rs", "use super::state::State;"), 1);
        assert_eq!(seen("state.rs", "use super::id::Shared;"), 0);
        assert_eq!(seen("connect.rs", "use super::{dial, qp};"), 0);
        assert_eq!(seen("mod.rs", "mod bind;\nfn f() { bind::f() }"), 0);
        assert_eq!(upward(&format!("{QP}push.rs"), "use super::send;").len(), 1);
        let refusal = format!("{GETINFO}refusal.rs");
        assert_eq!(
            upward(&refusal, "use super::negotiate::all_terms;"),
            [""; 0]
        );
        assert_eq!(upward(&refusal, "use super::build;").len(), 1);
        assert_eq!(without_layer([&*format!("{CM}new.rs")]).len(), 1);
    }

    #[test]
    fn an_arrow_upward_in_rdm_endpoints_is_seen() {
        let seen = |path: &str, text| upward(&format!("{RDM}{path}"), text).len();
        assert_eq!(seen("operations.rs", "use super::rma::RmaOp;"), 1);
        assert_eq!(seen("long/pulls.rs", "use crate::rdm::receives::Store;"), 1);
        assert_eq!(seen("search.rs", "use super::shared::State;"), 1);
        assert_eq!(seen("shared.rs", "use super::endpoint::Endpoint;"), 1);
        assert_eq!(
            seen("link/cm.rs", "use super::super::receives::Arrival;"),
            0
        );
        assert_eq!(seen("link/cm.rs", "use super::block::LinkBlock;"), 0);
        assert_eq!(seen("link/cm.rs", "use crate::rdm::shared::Shared;"), 1);
        assert_eq!(
            seen("shared/driven.rs", "use crate::rdm::cq_source::CqSource;"),
            0
        );
        assert_eq!(
            seen("tests/rma.rs", "use crate::rdm::endpoint::Endpoint;"),
            0
        );
        assert_eq!(without_layer(["src/rdm/mod.rs", "src/rdm/new.rs"]).len(), 1);
    }

    #[test]
    fn what_a_closed_module_uses_is_seen() {
        let seen = |path: &str, code: &str| !upward(&format!("{RDM}{path}"), code).is_empty();
        assert!(seen(
            "core/evict.rs",
            "use super::super::link::links::Links;"
        ));
        assert!(seen("core/evict.rs", "use crate::rdm::executor::Executor;"));
        assert!(seen("core/evict.rs", "use crate::rdm::Endpoint;"));
        assert!(seen("core/evict.rs", "use crate::queue::Cell;"));
        assert!(seen("core.rs", "use super::link::links::Links;"));
        assert!(!seen("core.rs", "use super::slab::Slab;"));
        assert!(!seen("core/peer.rs", "use crate::rdm::slab::Key;"));
        assert!(!seen("core/peer.rs", "use super::link::LinkKey;"));
        assert!(!seen("core/peer.rs", "use crate::wire::rdm::Number;"));
        assert!(!seen("link/links.rs", "use super::core::Core;"));
    }

    /// Each use of a module by one of its layer or of a lower one, but for the exceptions.
    #[test]
    fn the_layers_of_the_crates_are_seen() {
        for of in CRATES {
            let modules = || of.layers.iter().flat_map(|layer| layer.iter());
            for module in modules() {
                let path = format!("{}{module}/file.rs", of.sources);
                for used in modules().filter(|used| *used != module) {
                    let down = of.layer(used) < of.layer(module);
                    let allowed = down || of.exceptions.contains(&(module, used));
                    let seen = upward(&path, &format!("use {}{used}::X;", of.root));
                    assert_eq!(seen.is_empty(), allowed, "{path}: {used}");
                }
            }
        }
    }

    /// An exception for a use that the layers allow is left from an earlier order.
    #[test]
    fn the_exceptions_are_against_the_layers() {
        for of in CRATES {
            for (module, used) in of.exceptions {
                assert!(of.layer(module).is_some() && of.layer(used).is_some());
                assert!(of.layer(module) <= of.layer(used), "{module}, {used}");
            }
        }
    }
}
