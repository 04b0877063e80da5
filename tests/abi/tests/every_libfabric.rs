//! One shared object in three libfabrics: 1.17 of Debian 12, 2.1, and 2.5 from a wheel.

use std::process::Command;

use abi_tests::outside::{self, Libfabric, must, peer, probe, system};

const PROBE: &str = env!("CARGO_BIN_EXE_abi-probe");

fn run(libfabric: &Libfabric, role: &str) -> String {
    let output = must(probe(PROBE, libfabric, &outside::provider_dir(), role));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn whole(libfabric: Option<Libfabric>) {
    let Some(libfabric) = libfabric else { return };
    for role in [
        "list",
        "hints",
        "order",
        "regions",
        "advise",
        "asynchronous",
        "shared",
        "xrcd",
        "endpoint",
        "bad-input",
        "slots",
    ] {
        let said = run(&libfabric, role);
        println!("{} {role}: {}", libfabric.name, said.trim());
    }
}

#[test]
fn the_system_s() {
    whole(Some(system()));
}

#[test]
fn release_2_1() {
    whole(peer("libfabric-2.1"));
}

#[test]
fn release_2_5() {
    whole(peer("libfabric-2.5"));
}

/// An application that is linked to 1.17 and runs with a newer library uses its compatibility
/// functions.
#[test]
fn an_old_program_in_a_new_library() {
    let Some(newer) = peer("libfabric-2.1") else {
        return;
    };
    let mut command = Command::new("fi_info");
    command
        .args(["-p", "weft", "-t", "FI_EP_MSG", "-v"])
        .env("FI_PROVIDER_PATH", outside::provider_dir())
        .env("LD_LIBRARY_PATH", newer.path.parent().expect("a directory"));
    let output = must(command);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("soft0") && text.contains("fi_link_attr"),
        "{text}"
    );
}

/// The listener queues as many connection requests as `FI_WEFT_BACKLOG` states.
#[test]
fn requests_that_wait() {
    let provider = outside::provider_dir();
    for (set, expected) in [(None, "128"), (Some("3"), "3"), (Some("700"), "700")] {
        let mut command = probe(PROBE, &system(), &provider, "backlog");
        command.arg(expected);
        if let Some(set) = set {
            command.env("FI_WEFT_BACKLOG", set);
        }
        must(command);
    }
}

/// `fi_info -e` prints the provider's parameters.
#[test]
fn parameters_are_shown() {
    let mut command = Command::new("fi_info");
    command
        .arg("-e")
        .env("FI_PROVIDER_PATH", outside::provider_dir());
    let output = must(command);
    let text = String::from_utf8_lossy(&output.stdout);
    for name in [
        "FI_WEFT_DEVICE",
        "FI_WEFT_TX_SIZE",
        "FI_WEFT_ACK_TIMEOUT",
        "FI_WEFT_FAULT",
    ] {
        assert!(text.contains(name), "no {name} in\n{text}");
    }
}

/// Advice on a device without on-demand paging, and for a region that is not registered.
#[test]
fn advice_that_cannot_be_followed() {
    let mut command = probe(PROBE, &system(), &outside::provider_dir(), "advise-refused");
    command.env("SOFTVERBS_ODP", "0");
    must(command);
    let mut command = probe(
        PROBE,
        &system(),
        &outside::provider_dir(),
        "advise-disabled",
    );
    command.env("FI_WEFT_MR_MODE", "LOCAL,VIRT_ADDR,PROV_KEY,ENDPOINT");
    must(command);
}

/// Local buffers on a device that pins: registrations are cached by default, and not if the cache
/// is disabled.
#[test]
fn buffers_without_registrations() {
    for libfabric in [Some(system()), peer("libfabric-2.1"), peer("libfabric-2.5")] {
        let Some(libfabric) = libfabric else { continue };
        for (name, value) in [
            ("FI_WEFT_MR_CACHE_CHECK", "1"),
            ("FI_WEFT_MR_CACHE_CHECK", "0"),
            ("FI_MR_CACHE_MERGE_REGIONS", "1"),
            ("FI_MR_CACHE_MAX_COUNT", "1"),
            ("FI_MR_CACHE_MAX_SIZE", "8192"),
            ("FI_MR_CACHE_MAX_COUNT", "0"),
            ("FI_MR_CACHE_MONITOR", "disabled"),
        ] {
            let provider = outside::provider_dir();
            let mut command = probe(PROBE, &libfabric, &provider, "unregistered");
            command
                .env("SOFTVERBS_ODP", "0")
                .env("FI_LOG_LEVEL", "warn")
                .env(name, value);
            let output = must(command);
            let said = String::from_utf8_lossy(&output.stdout);
            let log = String::from_utf8_lossy(&output.stderr);
            // the tests' buffers are longer than 8192 bytes
            let none = matches!(value, "8192" | "disabled")
                || (name, value) == ("FI_MR_CACHE_MAX_COUNT", "0");
            let refused = log.contains("userfaultfd is not available");
            let wanted = if none || refused { "each" } else { "kept" };
            assert_eq!(said.lines().next(), Some(wanted), "{name}={value}: {log}");
        }
    }
}

/// The queue pair of a connection has the attributes that the parameters set.
#[test]
fn parameters_reach_the_queue_pair() {
    let mut command = probe(PROBE, &system(), &outside::provider_dir(), "endpoint");
    command
        .env("FI_LOG_LEVEL", "info")
        .env("FI_WEFT_MIN_RNR_TIMER", "21")
        .env("FI_WEFT_RNR_RETRY_COUNT", "5")
        .env("FI_WEFT_ACK_TIMEOUT", "13")
        .env("FI_WEFT_RETRY_COUNT", "4")
        .env("FI_WEFT_TRAFFIC_CLASS", "64")
        .env("FI_WEFT_TX_SIZE", "100")
        .env("FI_WEFT_RX_SIZE", "77")
        .env("FI_WEFT_INLINE_SIZE", "200");
    let output = must(command);
    let text = String::from_utf8_lossy(&output.stderr);
    // the engine adds 31 sends of its own: directory reads, parts of an operation, their flushes
    // and event, the marker and the probe
    let wanted = "min_rnr_timer: 21, rnr_retry: 5, retry_cnt: 4, timeout: 13, traffic_class: 64, max_send_wr: 131, max_recv_wr: 77, max_inline_data: 200";
    assert!(text.contains(wanted), "no {wanted} in\n{text}");
}
