//! The roles of the second process.

use std::collections::HashSet;
use std::io::BufRead;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_core_sys::*;

use crate::buffer::*;
use crate::harness::*;
use crate::process::*;

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// A command of the first process, if one has arrived.
fn told(wait: Duration) -> Option<String> {
    let mut poll = libc::pollfd {
        fd: 0,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one writable element.
    if unsafe { libc::poll(&raw mut poll, 1, wait.as_millis() as i32) } != 1 {
        return None;
    }
    let mut line = String::new();
    // the first process waits for each answer, so at most one line is pending
    std::io::stdin().lock().read_line(&mut line).unwrap();
    // at the end of the input, the first process has ended
    Some(if line.is_empty() {
        "exit".into()
    } else {
        line.trim().to_owned()
    })
}

pub(crate) fn run() {
    match variable("CM_ROLE").as_str() {
        "serve" => serve(),
        "dial" => dial(),
        "dial_many" => dial_many(),
        "fork" => fork(),
        "fork_listening" => fork_listening(),
        "wait" => wait(),
        role => panic!("no role {role:?}: this test is started by others"),
    }
}

fn serve() {
    let channel = Channel::new();
    let backlog = variable("CM_BACKLOG").parse().unwrap_or(64);
    let (listener, at) = channel.listener(&variable("CM_BIND"), backlog);
    let answer = variable("CM_ANSWER");
    let mut paused = variable("CM_PAUSED") == "1";
    let mut ids = HashSet::new();
    let mut echo = None;
    say(&format!("listening on {at}"));
    loop {
        match told(Duration::from_millis(1)).as_deref() {
            Some("exit") => break,
            Some("go") => paused = false,
            Some("descriptors") => say(&format!("{} descriptors", open_descriptors())),
            Some("disconnect") => {
                for &id in &ids {
                    assert_eq!(Id(id as *mut rdma_cm_id).disconnect(), 0);
                }
            }
            Some(other) => panic!("told {other:?}"),
            None => {}
        }
        if let Some((id, incoming)) = &echo
            && completion(Id::c(*id).recv_cq).is_some_and(|wc| wc.status == IBV_WC_SUCCESS)
        {
            let text = [trimmed(Buffer::bytes(incoming)), b" back"].concat();
            let mut outgoing = Buffer::new(*id, &text);
            outgoing.post_send(*id);
            assert_eq!(wait_for_completion(id.c().send_cq).status, IBV_WC_SUCCESS);
        }
        if paused {
            continue;
        }
        let Some(said) = channel.next_within(Duration::from_millis(5)) else {
            continue;
        };
        if said.kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            assert_eq!(said.listener, listener);
            if answer != "quiet" {
                request(&said);
            }
            if answer == "echo" {
                assert_eq!(said.id.create_qp(), 0);
                let mut incoming = Buffer::new(said.id, b"");
                incoming.post_recv(said.id);
                assert_eq!(said.id.accept(&mut param(b"")), 0);
                echo = Some((said.id, incoming));
            }
            match answer.as_str() {
                "reject" => {
                    assert_eq!(said.id.reject(b"not today"), 0);
                    said.id.destroy();
                    continue;
                }
                "accept" | "quiet" => {
                    assert_eq!(said.id.create_qp(), 0);
                    // a request whose sender has ended has its own event
                    let accepted = said.id.accept(&mut param(b"welcome"));
                    assert!(accepted == 0 || answer == "quiet");
                }
                _ => {}
            }
            ids.insert(said.id.0 as usize);
            continue;
        }
        if answer != "quiet" {
            let state = if said.id.c().qp.is_null() {
                0
            } else {
                said.id.qp_state()
            };
            say(&format!("{} {} qp {state}", said.name(), said.status));
        }
        let last = match said.kind {
            RDMA_CM_EVENT_DISCONNECTED => {
                // a real peer waits for this
                assert_eq!(said.id.disconnect(), 0);
                !softverbs()
            }
            kind => kind == RDMA_CM_EVENT_TIMEWAIT_EXIT || kind == RDMA_CM_EVENT_REJECTED,
        };
        if last {
            assert!(ids.remove(&(said.id.0 as usize)));
            echo = None;
            said.id.destroy();
        }
    }
    drop(echo);
    for id in ids {
        Id(id as *mut rdma_cm_id).destroy();
    }
    listener.destroy();
    channel.destroy();
}

fn trimmed(bytes: &[u8]) -> &[u8] {
    let len = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    &bytes[..len]
}

fn request(said: &Said) {
    let text = String::from_utf8_lossy(&said.data);
    assert!(!said.id.c().verbs.is_null());
    assert!(said.id.source().is_some());
    say(&format!(
        "request {} {} from {} resources {} depth {} retry {} rnr {}",
        text.trim_end_matches('\0'),
        said.data.len(),
        said.id.destination().unwrap(),
        said.conn.responder_resources,
        said.conn.initiator_depth,
        said.conn.retry_count,
        said.conn.rnr_retry_count,
    ));
}

fn dial() {
    let channel = Channel::new();
    let to: SocketAddr = variable("CM_TO").parse().unwrap();
    let data = variable("CM_DATA");
    let paused = variable("CM_PAUSED") == "1";
    let id = channel.routed(to);
    assert_eq!(id.create_qp(), 0);
    assert_eq!(id.connect(&mut param(data.as_bytes())), 0);
    if variable("CM_SAY") == "1" {
        say("connecting");
    }
    while told(Duration::from_millis(5)).as_deref() != Some("exit") {
        if paused {
            continue;
        }
        if let Some(said) = channel.next_within(Duration::from_millis(5)) {
            let text = String::from_utf8_lossy(&said.data);
            let text = text.trim_end_matches('\0');
            say(&format!("{} {} data {text}", said.name(), said.status));
        }
    }
    id.destroy();
    channel.destroy();
}

fn dial_many() {
    let to: SocketAddr = variable("CM_TO").parse().unwrap();
    let channel = Channel::new();
    let connect = || {
        let id = channel.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"many")), 0);
        channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
        assert_eq!(id.disconnect(), 0);
        channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
        id.destroy();
    };
    connect();
    let first = open_descriptors();
    say("one");
    assert_eq!(told(PATIENCE).as_deref(), Some("go"));
    for _ in 0..200 {
        connect();
    }
    say(&format!("{first} {}", open_descriptors()));
    channel.destroy();
    assert_eq!(told(PATIENCE).as_deref(), Some("exit"));
}

/// Connects; so does a child process that is forked in between.
fn fork() {
    let to: SocketAddr = variable("CM_TO").parse().unwrap();
    let channel = Channel::new();
    let connect = |channel: Channel| {
        let id = channel.routed(to);
        assert_eq!(id.create_qp(), 0);
        assert_eq!(id.connect(&mut param(b"fork")), 0);
        channel.expect(RDMA_CM_EVENT_ESTABLISHED, 0);
        id
    };
    let id = connect(channel);
    // SAFETY: no other thread of this process holds a lock that the child needs: the thread that
    // runs the tests waits for this one.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let works = std::panic::catch_unwind(|| {
            let channel = Channel::new();
            let id = connect(channel);
            assert_eq!(id.disconnect(), 0);
            channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
            id.destroy();
            channel.destroy();
        });
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(i32::from(works.is_err())) };
    }
    let mut status = 0;
    // SAFETY: a child of this process and a writable status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child could not connect");
    // the parent's connection is unaffected
    assert_eq!(id.qp_state(), IBV_QPS_RTS);
    channel.expect_silence();
    assert_eq!(id.disconnect(), 0);
    channel.expect(RDMA_CM_EVENT_DISCONNECTED, 0);
    id.destroy();
    channel.destroy();
    say("forked");
}

/// Destroys a listener while a forked child has a copy of its socket.
fn fork_listening() {
    let channel = Channel::new();
    let (listener, at) = channel.listener(&variable("CM_BIND"), 8);
    say(&format!("listening on {at}"));
    assert_eq!(told(PATIENCE).as_deref(), Some("go"));
    // SAFETY: the child makes system calls, until it ends with this process or by its signal.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
        child
    };
    assert!(child > 0);
    listener.destroy();
    say("destroyed");
    assert_eq!(told(PATIENCE).as_deref(), Some("exit"));
    channel.destroy();
    // SAFETY: a child of this process, which has not been waited for.
    unsafe {
        assert_eq!(libc::kill(child, libc::SIGKILL), 0);
        assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
    }
}

/// Threads wait for an event of the connection manager, of a completion channel and of the device,
/// none of which comes.
fn wait() {
    let channel = Channel::new();
    // SAFETY: the channel's descriptor.
    assert_eq!(unsafe { libc::fcntl(channel.fd(), libc::F_SETFL, 0) }, 0);
    let id = channel.id();
    assert_eq!(id.bind("127.0.0.1:0"), 0);
    let context = id.c().verbs as usize;
    let device = move || context as *mut ibv_context;
    let of_channel = std::thread::spawn(move || {
        let channel = channel;
        channel.raw().map(drop)
    });
    let of_queues = std::thread::spawn(move || {
        let (mut cq, mut user) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live context; room for pointers.
        errno_of(unsafe {
            let channel = (verbs().ibv_create_comp_channel)(device());
            (verbs().ibv_get_cq_event)(channel, &raw mut cq, &raw mut user)
        })
    });
    let of_device = std::thread::spawn(move || {
        let mut event = ibv_async_event::default();
        // SAFETY: a live context; a writable structure.
        errno_of(unsafe { (verbs().ibv_get_async_event)(device(), &raw mut event) })
    });
    std::thread::sleep(Duration::from_millis(100));
    say("waiting");
    assert_eq!(told(PATIENCE).as_deref(), Some("go"));
    say(&format!(
        "ended: {} {} {}",
        of_channel.is_finished(),
        of_queues.is_finished(),
        of_device.is_finished()
    ));
    assert_eq!(told(PATIENCE).as_deref(), Some("exit"));
}
