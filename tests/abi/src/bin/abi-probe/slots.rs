//! Every slot of every ops table, with every kind of invalid handle: NULL, another class, another
//! provider's, and a closed handle. The result is `-FI_EINVAL`, or `-FI_ENOSYS` if the slot is not
//! implemented.
//!
//! Slots that post, read completions or change a counter do not check the class of a handle, as in
//! all providers: they are tried with closed handles only.

use std::ptr::null_mut;

use abi_tests::call;
use abi_tests::fabric::hints;
use abi_tests::load::Lib;
use abi_tests::objects::{Setup, bind, close, cq_attr, foreign, open_cq, open_ep, register};
use libfabric_sys::*;

/// The type of any slot: in C's calling conventions a function ignores additional arguments; all
/// arguments are integers or pointers here.
type Slot = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> isize;

/// The kind of a refusing slot's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// A negative errno.
    Errno,
    /// A text, never NULL.
    Text,
    /// A counter's value, 0.
    Value,
}

/// One table of a fid.
struct Table {
    name: &'static str,
    /// Offset of the table's pointer in the object.
    offset: usize,
    /// Indices of the slots that do not check their handle.
    trusting: &'static [usize],
    /// The slots whose result is not an errno.
    other: &'static [(usize, Answer)],
}

const fn table(name: &'static str, offset: usize, trusting: &'static [usize]) -> Table {
    Table {
        name,
        offset,
        trusting,
        other: &[],
    }
}

const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
const NONE: &[usize] = &[];
/// All slots except the three `valid` calls, whose handle is checked.
const ATOMICS: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const READS: &[usize] = &[0, 1, 3, 4];
const RECEIVES: &[usize] = &[0, 1, 2];
const TEXT_OF_CQ: &[(usize, Answer)] = &[(6, Answer::Text)];
const TEXT_OF_EQ: &[(usize, Answer)] = &[(4, Answer::Text)];
const VALUES: &[(usize, Answer)] = &[(0, Answer::Value), (1, Answer::Value)];

macro_rules! at {
    ($type:ident, $field:ident) => {
        std::mem::offset_of!($type, $field)
    };
}

/// `fid.ops` is at the same place in all of them.
const FID: usize = at!(fid, ops);

/// An object and its tables.
struct Subject {
    name: &'static str,
    fid: *mut fid,
    tables: Vec<Table>,
}

unsafe fn slots_of(fid: *mut fid, table: &Table) -> Vec<Slot> {
    // SAFETY: the offset is that of a pointer to a table, which begins with its size.
    unsafe {
        let at = fid.cast::<u8>().add(table.offset).cast::<*const usize>();
        let start = at.read();
        assert!(!start.is_null(), "{}: no table", table.name);
        let count = start.read() / size_of::<usize>() - 1;
        let slots = std::slice::from_raw_parts(start.add(1).cast::<Option<Slot>>(), count);
        let whole = slots.iter().enumerate();
        whole
            .map(|(i, slot)| slot.unwrap_or_else(|| panic!("{}: slot {i} is NULL", table.name)))
            .collect()
    }
}

/// Calls each slot of a table with `handle`; all other arguments are 0.
unsafe fn refuses(subject: &Subject, table: &Table, handle: *mut fid, what: &str, closed: bool) {
    // SAFETY: slots of the object's own tables. What is wrong is what is tried.
    unsafe {
        for (index, slot) in slots_of(subject.fid, table).into_iter().enumerate() {
            if !closed && table.trusting.contains(&index) {
                continue;
            }
            let first = handle.expose_provenance();
            let answer = slot(first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let place = format!("{}.{} slot {index}, {what}", subject.name, table.name);
            let kind = table.other.iter().find(|other| other.0 == index);
            match kind.map_or(Answer::Errno, |kind| kind.1) {
                Answer::Text => assert_ne!(answer, 0, "{place}"),
                Answer::Value => assert_eq!(answer, 0, "{place}"),
                Answer::Errno => {
                    // a function that returns an int leaves the upper half of the register
                    // undefined
                    let errno = answer as i32;
                    let invalid = errno == -FI_EINVAL;
                    let absent = errno == -FI_ENOSYS && !closed;
                    assert!(invalid || absent, "{place}: {errno}");
                }
            }
        }
    }
}

fn ep_tables(messages: &'static [usize]) -> Vec<Table> {
    vec![
        table("fid", FID, NONE),
        table("ep", at!(fid_ep, ops), NONE),
        table("cm", at!(fid_ep, cm), NONE),
        table("msg", at!(fid_ep, msg), messages),
        table("rma", at!(fid_ep, rma), ALL),
        table("tagged", at!(fid_ep, tagged), NONE),
        table("atomic", at!(fid_ep, atomic), ATOMICS),
    ]
}

unsafe fn subjects(setup: &Setup, memory: &mut [u8]) -> Vec<Subject> {
    // SAFETY: objects of this setup.
    unsafe {
        let (fabric, domain) = (setup.fabric, setup.domain);
        let info = setup.info.first();
        let mut pep = null_mut();
        let open = (*(*fabric).ops).passive_ep.expect("a slot");
        assert_eq!(open(fabric, info, &raw mut pep, null_mut()), 0);
        let mut srx = null_mut();
        let open = (*(*domain).ops).srx_ctx.expect("a slot");
        assert_eq!(open(domain, null_mut(), &raw mut srx, null_mut()), 0);
        let mut set = null_mut();
        let open = (*(*domain).ops).poll_open.expect("a slot");
        assert_eq!(open(domain, null_mut(), &raw mut set), 0);
        let mut cntr = null_mut();
        let open = (*(*domain).ops).cntr_open.expect("a slot");
        assert_eq!(open(domain, null_mut(), &raw mut cntr, null_mut()), 0);
        let cq = open_cq(domain, cq_attr(FI_CQ_FORMAT_MSG, FI_WAIT_NONE));
        let ep = open_ep(setup, info);
        let mr = register(domain, memory.as_mut_ptr(), memory.len(), FI_RECV);
        // in an order in which they can be closed
        vec![
            Subject {
                name: "ep",
                fid: ep.cast(),
                tables: ep_tables(ALL),
            },
            Subject {
                name: "srx",
                fid: srx.cast(),
                tables: ep_tables(RECEIVES),
            },
            Subject {
                name: "pep",
                fid: pep.cast(),
                tables: vec![
                    table("fid", FID, NONE),
                    table("ep", at!(fid_pep, ops), NONE),
                    table("cm", at!(fid_pep, cm), NONE),
                ],
            },
            Subject {
                name: "poll",
                fid: set.cast(),
                tables: vec![
                    table("fid", FID, NONE),
                    table("poll", at!(fid_poll, ops), NONE),
                ],
            },
            Subject {
                name: "cntr",
                fid: cntr.cast(),
                tables: vec![
                    table("fid", FID, NONE),
                    Table {
                        other: VALUES,
                        ..table("cntr", at!(fid_cntr, ops), ALL)
                    },
                ],
            },
            Subject {
                name: "cq",
                fid: cq.cast(),
                tables: vec![
                    table("fid", FID, NONE),
                    Table {
                        other: TEXT_OF_CQ,
                        ..table("cq", at!(fid_cq, ops), READS)
                    },
                ],
            },
            Subject {
                name: "mr",
                fid: mr.cast(),
                tables: vec![table("fid", FID, NONE)],
            },
        ]
    }
}

fn parents(setup: &Setup) -> Vec<Subject> {
    vec![
        Subject {
            name: "domain",
            fid: setup.domain.cast(),
            tables: vec![
                table("fid", FID, NONE),
                table("domain", at!(fid_domain, ops), NONE),
                table("mr", at!(fid_domain, mr), NONE),
            ],
        },
        Subject {
            name: "eq",
            fid: setup.eq.cast(),
            tables: vec![
                table("fid", FID, NONE),
                Table {
                    other: TEXT_OF_EQ,
                    ..table("eq", at!(fid_eq, ops), NONE)
                },
            ],
        },
        Subject {
            name: "fabric",
            fid: setup.fabric.cast(),
            tables: vec![
                table("fid", FID, NONE),
                table("fabric", at!(fid_fabric, ops), NONE),
            ],
        },
    ]
}

pub(crate) fn run(lib: &Lib) {
    let hints = hints(lib);
    let setup = Setup::new(lib, Some("127.0.0.1"), None, FI_SOURCE, &hints);
    let mut memory = vec![0_u8; 4096];
    // SAFETY: objects as they are opened; the memory outlives its region.
    unsafe {
        let children = subjects(&setup, &mut memory);
        let parents = parents(&setup);
        let all = || children.iter().chain(&parents);
        let mut tried = 0;
        for subject in all() {
            let other = all().find(|o| (*o.fid).fclass != (*subject.fid).fclass);
            let other = other.expect("another object").fid;
            let mut stranger = foreign((*subject.fid).fclass);
            for table in &subject.tables {
                refuses(subject, table, null_mut(), "no handle", false);
                refuses(
                    subject,
                    table,
                    &raw mut *stranger,
                    "a foreign handle",
                    false,
                );
                // Connection calls are of two classes, and `close` accepts any object with the same
                // table.
                if table.name != "cm" {
                    refuses(subject, table, other, "another class", false);
                }
                tried += slots_of(subject.fid, table).len();
            }
        }
        // The refused calls had no effect: the objects can be bound, and each closed once in order.
        assert_eq!(close(setup.domain), -FI_EBUSY);
        assert_eq!(close(setup.fabric), -FI_EBUSY);
        let pep = children.iter().find(|s| s.name == "pep").expect("one").fid;
        assert_eq!(bind(pep, setup.eq, 0), 0);
        for subject in &children {
            assert_eq!(close(subject.fid), 0, "closing the {}", subject.name);
            for table in &subject.tables {
                refuses(subject, table, subject.fid, "closed", true);
            }
        }
        let last = call!(
            (*setup.cq).ops,
            read,
            setup.cq,
            memory.as_mut_ptr().cast(),
            1
        );
        assert_eq!(last, -(FI_EAGAIN as isize), "the queue of the setup works");
        println!("{tried} slots refuse what is not theirs");
        let objects = [
            setup.domain.cast::<fid>(),
            setup.eq.cast(),
            setup.fabric.cast(),
        ];
        setup.close();
        for (subject, fid) in parents.iter().zip(objects) {
            assert_eq!(subject.fid, fid);
            for table in &subject.tables {
                refuses(subject, table, fid, "closed", true);
            }
        }
    }
}
