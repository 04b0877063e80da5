//! Kernels that refuse calls: system call filters, and users without privileges.

#![allow(
    unreachable_pub,
    dead_code,
    reason = "shared by programs, each of which uses a part"
)]

/// A system call that the kernel refuses.
#[derive(Clone, Copy)]
pub struct Rule {
    pub call: libc::c_long,
    /// Only with this value in the lower 32 bits of the argument with this index.
    pub argument: Option<(u32, u32)>,
    /// The result of the call.
    pub errno: i32,
}

/// Refuses these system calls to this thread, and to the threads and children that it makes.
pub fn refuse_by(rules: &[Rule]) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = Vec::new();
    for rule in rules {
        // the filter's input is `struct seccomp_data`: the number of the call, and at 16 its
        // arguments
        filter.push(step(LOAD, 0, 0, 0));
        let steps = if rule.argument.is_some() { 3 } else { 1 };
        filter.push(step(EQUAL, 0, steps, rule.call as u32));
        if let Some((index, value)) = rule.argument {
            filter.push(step(LOAD, 0, 0, 16 + 8 * index));
            filter.push(step(EQUAL, 0, 1, value));
        }
        let refusal = libc::SECCOMP_RET_ERRNO | rule.errno.cast_unsigned();
        filter.push(step(RETURN, 0, 0, refusal));
    }
    filter.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: a filter that lives as long as the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        let set = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program);
        assert_eq!(set, 0);
    }
}

/// As [`refuse_by`], with `EPERM` and whatever the arguments are.
pub fn refuse(calls: &[libc::c_long]) {
    let rule = |&call| Rule {
        call,
        argument: None,
        errno: libc::EPERM,
    };
    refuse_by(&calls.iter().map(rule).collect::<Vec<_>>());
}

/// Refuses copies between processes to this process and its future children.
pub fn refuse_copies() {
    refuse(&[libc::SYS_process_vm_readv, libc::SYS_process_vm_writev]);
    let own = reading(std::process::id().cast_signed());
    assert_eq!(own, libc::EPERM, "the filter refuses nothing");
}

/// The unprivileged user of most systems.
pub const NOBODY: u32 = 65_534;

/// Changes the user of this process to `NOBODY`, if it was root.
pub fn become_nobody() {
    // SAFETY: no memory is passed but a list of no groups.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
        assert_ne!(libc::geteuid(), 0);
    }
}

/// Sets whether other processes of the user may access this one. A new program permits it, if they
/// can read its file.
pub fn set_dumpable(dumpable: bool) {
    // SAFETY: no memory is passed.
    let ret = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, u64::from(dumpable), 0, 0, 0) };
    assert_eq!(ret, 0);
}

/// The kernel's result of reading a byte of another process's memory, which need not exist: 0 or an
/// errno.
pub fn reading(pid: i32) -> i32 {
    let mut byte = 0u8;
    let piece = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: the local piece is this function's; nothing of the other process changes.
    let n = unsafe { libc::process_vm_readv(pid, &raw const piece, 1, &raw const piece, 1, 0) };
    if n == 1 { 0 } else { errno() }
}

/// The kernel's result of opening a descriptor of another process.
pub fn opening(pid: i32, fd: i32) -> i32 {
    match std::fs::File::open(format!("/proc/{pid}/fd/{fd}")) {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap(),
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}
