"""Bugs that a tool must detect in the loaded object while fi_pingpong runs on it.

All are planted in one copy of the tree, and the environment selects the active one, so one build is
enough.
"""

from typing import NamedTuple

VARIABLE = "WEFT_PLANTED"


class Bug(NamedTuple):
    name: str
    path: str
    before: str  # the bug is inserted before this line, or
    behind: str  # after this line
    code: str
    asan: str  # the tool's report; empty if the tool cannot detect the bug
    valgrind: str

    @property
    def right(self):
        return self.before or self.behind

    @property
    def wrong(self):
        planted = f'    if std::env::var("{VARIABLE}").is_ok_and(|name| name == "{self.name}") {{ unsafe {{ {self.code} }} }}\n'
        return planted + self.before if self.before else self.behind + planted


SLOTS = "src/queue/slots.rs"

PLANTED = [
    Bug(
        "a write behind the end",
        SLOTS,
        "        // SAFETY: there is room, so the slot is the poster's.\n",
        "",
        "self.slot(self.mask).with_mut(|place| place.add(1).write(slot));",
        "heap-buffer-overflow",
        "Invalid write",
    ),
    Bug(
        "a use after the end of life",
        "crates/softverbs/src/abi/mr.rs",
        "",
        "        drop(unsafe { Box::from_raw(mr) });\n",
        "(&raw mut (*mr).lkey).write_volatile(7);",
        "heap-use-after-free",
        "Invalid write",
    ),
    Bug(
        "memory that nobody has any more",
        SLOTS,
        "        let size = (depth + more).next_power_of_two();\n",
        "",
        "std::ptr::write_volatile(libc::malloc(4321).cast::<u8>(), 1);",
        r"leak of (4321|8642) byte",
        r"(4,321|8,642) bytes in \d blocks are definitely lost",
    ),
    Bug(
        "a decision by what was never written",
        SLOTS,
        "        let after = number.wrapping_add(1);\n",
        "",
        'let word = libc::malloc(4).cast::<u32>(); if word.read_volatile() == 7 { eprintln!("seven"); } libc::free(word.cast());',
        "",
        "Conditional jump or move depends on uninitialised value",
    ),
]
