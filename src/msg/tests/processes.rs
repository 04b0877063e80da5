//! Two processes: this test program starts itself again as the peer.

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use super::*;

const ROLE: &str = "WEFT_TEST_ROLE";

/// The other process; killed on drop if it still runs.
struct Peer {
    child: Child,
    // a closed pipe would make the child's test runner fail
    _output: Lines<BufReader<ChildStdout>>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts this program as a server that prints its address.
fn server(role: &str) -> (Peer, SocketAddr) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "msg::tests::processes::peer"])
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let addr = output
        .by_ref()
        .map_while(std::io::Result::ok)
        // the test runner may print text before it on the line
        .find_map(|line| Some(line.split_once("address ")?.1.parse().unwrap()))
        .expect("the peer says its address");
    let peer = Peer {
        child,
        _output: output,
    };
    (peer, addr)
}

/// Entry point of the other process; does nothing in an ordinary run of the tests.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let device = device();
    let eq = EventQueue::open(EqConfig::default()).unwrap();
    let (_pep, addr) = listener(&device, &eq);
    println!("address {addr}");
    std::io::stdout().flush().unwrap();
    let (request, data) = next_request(&eq);
    let side = Side::accepting(&device, request, config(SERVER));
    side.ep.enable().unwrap();
    let exposed = Buffer::all(&side.domain, 1 << 20);
    let target = Buffer::all(&side.domain, 1 << 20);
    for context in 0..32 {
        side.recv(&target, 1 << 20, context).unwrap();
    }
    let mut answer = data;
    answer.extend(exposed.addr().to_le_bytes());
    answer.extend(exposed.region.key().to_le_bytes());
    side.ep.accept(&answer).unwrap();
    assert!(matches!(next_event(&side.eq), Ok(Told::Connected(..))));
    if role == "echo" {
        for _ in 0..100 {
            let got = side.completion().unwrap();
            side.send(&target, got.len, 0).unwrap();
            side.completion().unwrap();
            side.recv(&target, 1 << 20, 0).unwrap();
        }
        assert_eq!(next_event(&side.eq), Ok(Told::Shutdown(SERVER)));
    } else {
        // the parent stops or kills this process
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
    }
}

/// Connects to the other process; returns the address and key of its region.
fn join(addr: SocketAddr) -> (Side, u64, u64) {
    let device = device();
    let client = Side::new(&device, config(CLIENT), false);
    client.ep.connect(Some(addr), b"join").unwrap();
    let Ok(Told::Connected(CLIENT, data)) = next_event(&client.eq) else {
        panic!("not connected");
    };
    assert_eq!(&data[..4], b"join");
    let number = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
    (client, number(4), number(12))
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

#[test]
fn two_processes_exchange_messages() {
    let (mut peer, addr) = server("echo");
    let (client, ..) = join(addr);
    let mut source = Buffer::all(&client.domain, 1 << 20);
    let target = Buffer::all(&client.domain, 1 << 20);
    for round in 0..100_usize {
        let len = [1, 64, 1000, 100_000][round % 4];
        source.fill(round as u8);
        client.recv(&target, 1 << 20, 1).unwrap();
        client.send(&source, len, 2).unwrap();
        // the reply and the completion of the send arrive in either order
        let contexts = [client.completion().unwrap(), client.completion().unwrap()];
        assert!(
            contexts.iter().any(|c| c.context == 1 && c.len == len),
            "{contexts:?}"
        );
        assert!(
            target.memory[..len] == source.memory[..len],
            "round {round}"
        );
    }
    client.ep.shutdown().unwrap();
    assert!(peer.child.wait().unwrap().success());
}

#[test]
fn a_stopped_process_s_memory_is_read_and_written() {
    let (mut peer, addr) = server("wait");
    let (client, remote, key) = join(addr);
    signal(&peer.child, libc::SIGSTOP);
    let mut source = Buffer::all(&client.domain, 1 << 18);
    source.fill(77);
    let back = Buffer::all(&client.domain, 1 << 18);
    for buffer in [&source, &back] {
        let (iov, desc) = buffer.part(0, 1 << 18);
        let local = LocalIov::single(&iov, &desc);
        // SAFETY: the buffers outlive the operations.
        unsafe {
            if std::ptr::eq(buffer, &source) {
                client.ep.write(local, remote, key, 1).unwrap();
            } else {
                client.ep.read(local, remote, key, 1).unwrap();
            }
        }
        client.completion().unwrap();
    }
    assert!(back.memory == source.memory);
    signal(&peer.child, libc::SIGKILL);
    peer.child.wait().unwrap();
}

#[test]
fn a_killed_peer_is_told() {
    let (mut peer, addr) = server("wait");
    let (client, ..) = join(addr);
    let waiting = Buffer::all(&client.domain, 64);
    client.recv(&waiting, 64, 1).unwrap();
    let start = Instant::now();
    signal(&peer.child, libc::SIGKILL);
    peer.child.wait().unwrap();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    assert_eq!(client.completion().unwrap_err().err, FiErrno::ECANCELED);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_peer_killed_under_load_is_told() {
    let (mut peer, addr) = server("wait");
    let (client, ..) = join(addr);
    let source = Buffer::all(&client.domain, 1 << 18);
    // more sends than the peer has receives, so the last ones stay outstanding
    let mut posted = 0;
    while client.send(&source, 1 << 18, posted) == Ok(()) {
        posted += 1;
    }
    signal(&peer.child, libc::SIGKILL);
    peer.child.wait().unwrap();
    assert_eq!(next_event(&client.eq), Ok(Told::Shutdown(CLIENT)));
    let mut failed = 0;
    for context in 0..posted {
        match client.completion() {
            Ok(done) => {
                assert_eq!(done.context, context);
                assert_eq!(failed, 0, "a success after a failure");
            }
            Err(error) => {
                assert_eq!(error.completion.context, context);
                failed += 1;
            }
        }
    }
    assert!(failed > 0);
}
