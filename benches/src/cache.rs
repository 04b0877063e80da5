//! The registration cache: the time that finding a cached registration adds to a post, by the
//! number of cached registrations.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use weft::domain::{Domain, DomainConfig};
use weft::mr::lkey_probe::LocalProbe;
use weft::mr::{CacheConfig, Form, LocalMemory, Mode, MrConfig};

use crate::stats::Quartiles;
use crate::worker::pin;

const PAGE: usize = 4096;
const COUNTS: [usize; 3] = [1, 1_000, 1_000_000];
const ROUNDS: usize = 15;
const LOOKUPS: usize = 200_000;
/// Target: maximum time of a hit, in nanoseconds.
const LIMIT: f64 = 30.0;

fn domain(check: bool) -> Arc<Domain> {
    let device = weft::verbs::devices(&[softverbs::backend()], false);
    let device = device.into_iter().next().expect("soft0");
    let config = DomainConfig {
        mr: MrConfig {
            form: Form::new(Mode::NATIVE, false),
            local: LocalMemory::Cached,
            cache: CacheConfig {
                max_size: Some(1 << 40),
                max_count: 1 << 21,
                check,
                ..CacheConfig::default()
            },
            ..MrConfig::default()
        },
        ..DomainConfig::default()
    };
    Domain::open(&device, config).expect("a domain")
}

/// Present pages that use no memory: each is the kernel's page of zeros.
fn pages(count: usize) -> usize {
    // SAFETY: a new mapping, which is never unmapped.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let start = libc::mmap(std::ptr::null_mut(), count * PAGE, prot, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        libc::madvise(start, count * PAGE, libc::MADV_NOHUGEPAGE);
        for page in 0..count {
            start.cast::<u8>().add(page * PAGE).read_volatile();
        }
        start as usize
    }
}

/// Looks the pages up, and returns the nanoseconds of one look-up.
fn time(probe: &mut LocalProbe, start: usize, order: &[u32]) -> f64 {
    let begin = Instant::now();
    for &page in order {
        let addr = std::ptr::without_provenance(start + page as usize * PAGE);
        // SAFETY: the pages are mapped and never unmapped.
        unsafe { probe.source(addr, 64) }.expect("an lkey");
    }
    begin.elapsed().as_nanos() as f64 / order.len() as f64
}

/// [`LOOKUPS`] page numbers below `among`, in an order without a pattern.
fn order(among: usize, seed: u64) -> Vec<u32> {
    let mut state = seed;
    (0..LOOKUPS)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as usize % among) as u32
        })
        .collect()
}

fn measure(domain: &Arc<Domain>, start: usize, threads: usize, among: usize) -> Vec<f64> {
    let barrier = Barrier::new(threads);
    let mut all = Vec::new();
    std::thread::scope(|scope| {
        let run = |thread: usize| {
            let (barrier, domain) = (&barrier, domain);
            move || {
                pin(thread);
                let mut probe = LocalProbe::new(domain.mr());
                let order = order(among, thread as u64 + 1);
                let mut times = Vec::new();
                for _ in 0..ROUNDS {
                    barrier.wait();
                    times.push(time(&mut probe, start, &order));
                }
                times
            }
        };
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(run(thread)))
            .collect();
        for thread in threads {
            all.extend(thread.join().expect("a thread"));
        }
    });
    all
}

/// `weft-bench cache`: measures hits and misses of the registration cache.
pub(crate) fn main() {
    let most = COUNTS[COUNTS.len() - 1];
    let start = pages(most);
    println!("finding a kept registration (quartiles)");
    for check in [false, true] {
        let domain = domain(check);
        let mut probe = LocalProbe::new(domain.mr());
        let mut made = 0;
        for count in COUNTS {
            let begin = Instant::now();
            let new = count - made;
            let fresh: Vec<u32> = (made as u32..count as u32).collect();
            time(&mut probe, start, &fresh);
            let each = begin.elapsed().as_nanos() as f64 / new.max(1) as f64;
            made = count;
            for threads in [1, 2] {
                for (name, among) in [
                    ("the same one", 1),
                    ("of the same 64", 64),
                    ("any", usize::MAX),
                ] {
                    if among > count && among != usize::MAX {
                        continue;
                    }
                    let times = Quartiles::of(&measure(&domain, start, threads, among.min(count)));
                    let verdict = match (check, times.median <= LIMIT) {
                        (true, _) => "with the kernel's answer",
                        (false, true) => "<= 30: met",
                        (false, false) => "<= 30: MISSED",
                    };
                    println!(
                        "hit, {name:<15} {count:>8} kept, {threads} threads  {:>7.1} ns ({:.1} - {:.1})  {verdict}",
                        times.median, times.low, times.high
                    );
                }
            }
            println!("miss, until there are {count:>8}: {each:.0} ns");
        }
    }
}
