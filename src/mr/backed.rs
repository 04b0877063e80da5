//! Which parts of the address space are mapped: `/proc/self/maps` (proc(5)).

use std::io::Result as IoResult;

/// The parts of a range that can be read, and written if that is asked for: first byte, and the one behind the
/// last. Neighbours are one. What is mapped may have no page yet: registering makes it.
///
/// # Errors
/// Where `/proc` is closed.
pub(super) fn runs(start: u64, end: u64, write: bool) -> IoResult<Vec<(u64, u64)>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(parse(&maps, start, end, write))
}

/// All mappings that are no file's, in order: first byte, and the one behind the last. Neighbours are not one.
///
/// # Errors
/// Where `/proc` is closed.
pub(super) fn anonymous() -> IoResult<Vec<(u64, u64)>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let own = lines(&maps).filter(|(_, _, rest)| is_anonymous(rest));
    Ok(own.map(|(from, to, _)| (from, to)).collect())
}

/// By the rights, offset, device, inode and name of a line.
fn is_anonymous(rest: &str) -> bool {
    let mut words = rest.split_whitespace().skip(3);
    // huge pages of `MAP_ANONYMOUS` are a file's that nobody can name
    words.next() == Some("0") || words.eq(["/anon_hugepage", "(deleted)"])
}

/// The range and the rights that each line says.
fn lines(maps: &str) -> impl Iterator<Item = (u64, u64, &str)> {
    maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(from)?, number(to)?, rest))
    })
}

fn parse(maps: &str, start: u64, end: u64, write: bool) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (from, to, rights) in lines(maps) {
        if !rights.starts_with('r') || (write && !rights.starts_with("rw")) {
            continue;
        }
        let (from, to) = (from.max(start), to.min(end));
        match runs.last_mut() {
            _ if from >= to => {}
            Some(last) if last.1 == from => last.1 = to,
            _ => runs.push((from, to)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0
3000-5000 r--p 00000000 fe:01 123                        /a file
5000-6000 ---p 00000000 00:00 0
6000-7000 rw-s 00000000 00:01 9                          /dev/zero (deleted)
8000-9000 rw-p 00000000 00:00 0                          [heap]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]
rubbish
";

    #[test]
    fn runs_have_the_rights_and_the_bounds() {
        let all = parse(MAPS, 0, u64::MAX, false);
        assert_eq!(all, [(0x1000, 0x5000), (0x6000, 0x7000), (0x8000, 0x9000)]);
        let written = parse(MAPS, 0, u64::MAX, true);
        assert_eq!(written[0], (0x1000, 0x3000));
        assert_eq!(written.len(), 3);
        assert_eq!(parse(MAPS, 0x2010, 0x2011, true), [(0x2010, 0x2011)]);
        assert_eq!(parse(MAPS, 0x5000, 0x6000, false), []);
    }

    #[test]
    fn a_mapping_is_a_file_s_by_its_inode() {
        let of = |line: &str| lines(line).all(|(_, _, rest)| is_anonymous(rest));
        let anonymous: Vec<_> = MAPS.lines().filter(|line| of(line)).collect();
        assert_eq!(anonymous.len(), 5, "{anonymous:?}"); // with the one that is no line
        assert!(of(
            "1000-3000 rw-p 00000000 00:0f 77   /anon_hugepage (deleted)"
        ));
        assert!(!of("1000-3000 rw-p 00000000 00:0f 77   /memfd:x (deleted)"));
        assert!(!of("1000-3000 rw-p 00000000 00:0f 77"));
    }

    #[test]
    fn what_is_there_is_found() {
        let memory = vec![0_u8; 100_000];
        let start = memory.as_ptr() as u64;
        let found = runs(start, start + 100_000, true).unwrap();
        assert_eq!(found, [(start, start + 100_000)]);
    }
}
