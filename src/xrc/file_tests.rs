use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::sync::Arc;

use super::*;
use crate::verbs::{Device, QpNumber, Target, Xrcd, devices};
use crate::xrc::NodeId;

/// A directory of this test, removed with its content.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let number = calls::random().unwrap();
        // a file system in memory, where each call is short
        let path = Path::new("/dev/shm").join(format!("weft-xrcd-{number:016x}"));
        std::fs::create_dir(&path).unwrap();
        set_mode(&path, 0o700);
        Self(path)
    }

    fn open(&self) -> OwnedFd {
        File::open(&self.0).unwrap().into()
    }

    fn search(&self) -> Search<'_> {
        Search {
            demanded: None,
            runtime_dir: Some(&self.0),
            device: "soft0",
            endpoints: Endpoints::Rdm,
            auth: 0,
        }
    }

    /// The names in `weft`.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.join("weft")).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// What the only place in this folder answers.
    fn place(&self) -> std::result::Result<DomainFile, Refused> {
        let place = BaseDir {
            base: self.0.clone(),
            leaf: Leaf(c"weft".into()),
            own: true,
        };
        place.find(c"xrcd-a")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn is_unsafe<T>(result: &std::result::Result<T, Refused>) -> bool {
    matches!(result, Err(Refused::Unsafe(_)))
}

fn found(search: &Search<'_>) -> DomainFile {
    match find(search).unwrap() {
        Found::File(file) => file,
        Found::Private(why) => panic!("{why}"),
    }
}

const NAME: &CStr = c"xrcd-x";

/// What exists when the openers and the collector begin.
#[derive(Clone, Copy, Debug)]
enum Before {
    /// No file.
    Nothing,
    /// The file of a process that was killed.
    Leftover,
    /// The collector is the last process that has the file, and closes it.
    Closing,
}

/// A step of an opener.
fn proceed(opener: &mut Opener<'_>) -> Step<(File, Identity)> {
    let step = opener.step().unwrap();
    if matches!(opener.state, Opening::Check(_)) {
        return opener.step().unwrap();
    }
    step
}

/// A step of a collector.
fn collect(collector: &mut Collector<'_>) -> Result<Step<()>> {
    let step = collector.step()?;
    if matches!(collector.state, Collecting::Check(_)) {
        return collector.step();
    }
    Ok(step)
}

/// One run of two openers and a collector. `choices` are the actors of the first steps, each as its
/// place among those that can take a step; then the first one takes it. Returns the choices of the
/// run, each with the number of actors that could take the step. A file is opened and checked in
/// one step, because the check has the same result at any time.
fn run(folder: &Folder, before: Before, choices: &[usize]) -> Vec<(usize, usize)> {
    let directory = folder.open();
    let at = directory.as_fd();
    let mut collector = match before {
        Before::Nothing => Collector::new(at, NAME),
        Before::Leftover => {
            drop(calls::open_file(at, NAME, true).unwrap());
            Collector::new(at, NAME)
        }
        Before::Closing => {
            let file = calls::open_file(at, NAME, true).unwrap();
            assert!(calls::try_lock(&file, false).unwrap());
            let mut collector = Collector::closing(at, NAME, file);
            assert!(matches!(collector.step(), Ok(Step::Next)), "the check");
            collector
        }
    };
    let mut openers = [Opener::new(at, NAME), Opener::new(at, NAME)];
    let mut open: [Option<(File, Identity)>; 2] = [None, None];
    let mut collecting = true;
    let mut blocked = [false; 2];
    let mut taken = Vec::new();
    loop {
        let can = |actor: &usize| match actor {
            2 => collecting,
            &opener => open[opener].is_none() && !blocked[opener],
        };
        let mut actors: Vec<usize> = (0..3).filter(can).collect();
        if matches!(openers[0].state, Opening::Open) && openers[0].rounds == 0 {
            // the openers are equal: the first one begins first
            actors.retain(|actor| *actor != 1);
        }
        if actors.is_empty() {
            break;
        }
        let choice = choices.get(taken.len()).copied().unwrap_or(0);
        taken.push((choice, actors.len()));
        match actors[choice] {
            2 => match collect(&mut collector) {
                Ok(Step::Next) => {}
                // `Busy` and `ENOENT`: nothing is collected
                Ok(Step::Busy | Step::Done(())) | Err(FiErrno::ENOENT) => {
                    collecting = false;
                    // its lock is released
                    collector.state = Collecting::Open;
                }
                Err(error) => panic!("{error}"),
            },
            opener => match proceed(&mut openers[opener]) {
                Step::Next => {}
                Step::Busy => {
                    assert!(collecting, "nobody has the exclusive lock");
                    blocked[opener] = true;
                    continue;
                }
                Step::Done(file) => open[opener] = Some(file),
            },
        }
        blocked = [false; 2];
        // a file in use has the name
        for (_, identity) in open.iter().flatten() {
            assert_eq!(calls::named(at, NAME), Ok(Some(*identity)), "{taken:?}");
        }
    }
    let [first, second] = open.map(Option::unwrap);
    assert_eq!(first.1, second.1, "two domains: {taken:?}");
    // the last one to close removes it
    assert!(matches!(
        Collector::closing(at, NAME, first.0).run(),
        Ok(())
    ));
    assert_eq!(calls::named(at, NAME), Ok(Some(second.1)));
    Collector::closing(at, NAME, second.0).run().unwrap();
    assert_eq!(calls::named(at, NAME), Ok(None), "a file is left");
    taken
}

/// Runs two openers and a collector in every order of their system calls; returns the number of
/// orders.
fn every_order(before: Before) -> usize {
    let folder = Folder::new();
    let (mut choices, mut runs) = (Vec::new(), 0);
    loop {
        let mut taken = run(&folder, before, &choices);
        runs += 1;
        // the next run differs in the last choice that has another actor
        while taken
            .pop_if(|(choice, actors)| *choice + 1 == *actors)
            .is_some()
        {}
        let Some((last, _)) = taken.last_mut() else {
            return runs;
        };
        *last += 1;
        choices = taken.iter().map(|(choice, _)| *choice).collect();
    }
}

#[test]
fn openers_agree_beside_a_collector_in_every_order() {
    let orders = [Before::Nothing, Before::Leftover].map(every_order);
    println!("{orders:?} orders");
    assert!(orders.iter().all(|orders| *orders > 100));
}

#[test]
fn openers_agree_beside_the_last_process_that_closes_in_every_order() {
    let orders = every_order(Before::Closing);
    println!("{orders} orders");
    assert!(orders > 100);
}

#[test]
fn a_directory_of_others_is_not_used() {
    let folder = Folder::new();
    assert!(folder.place().is_ok());
    let weft = folder.0.join("weft");
    assert_eq!(std::fs::metadata(&weft).unwrap().mode() & 0o777, 0o700);
    for path in [&weft, &folder.0] {
        for mode in [0o720, 0o702] {
            set_mode(path, mode);
            assert!(is_unsafe(&folder.place()), "{mode:o}");
        }
        set_mode(path, 0o700);
        assert!(folder.place().is_ok());
    }
    if calls::user() == 0 {
        std::os::unix::fs::chown(&weft, Some(1), None).unwrap();
        assert!(is_unsafe(&folder.place()));
        std::os::unix::fs::chown(&weft, Some(0), None).unwrap();
    }
    // a symbolic link, also to a safe directory
    std::fs::rename(&weft, folder.0.join("real")).unwrap();
    symlink(folder.0.join("real"), &weft).unwrap();
    assert!(is_unsafe(&folder.place()));
    // no directory
    std::fs::remove_file(&weft).unwrap();
    std::fs::write(&weft, "").unwrap();
    assert!(is_unsafe(&folder.place()));
}

#[test]
fn a_file_that_others_may_have_made_is_not_used() {
    let folder = Folder::new();
    drop(folder.place().unwrap());
    let file = folder.0.join("weft/xrcd-a");
    let make = |mode: u32| {
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true).mode(mode);
        options.open(&file).unwrap();
        set_mode(&file, mode);
    };
    // a process that can read it can lock it
    for mode in [0o620, 0o602, 0o640, 0o604] {
        make(mode);
        assert!(is_unsafe(&folder.place()), "{mode:o}");
        std::fs::remove_file(&file).unwrap();
    }
    make(0o600);
    std::fs::hard_link(&file, folder.0.join("other")).unwrap();
    assert!(is_unsafe(&folder.place()), "two names");
    std::fs::remove_file(&file).unwrap();
    symlink(folder.0.join("other"), &file).unwrap();
    assert!(is_unsafe(&folder.place()), "a symbolic link");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(folder.place().is_err(), "a directory");
    std::fs::remove_dir(&file).unwrap();
    if calls::user() == 0 {
        make(0o600);
        std::os::unix::fs::chown(&file, Some(1), None).unwrap();
        assert!(is_unsafe(&folder.place()), "another user");
        std::fs::remove_file(&file).unwrap();
    }
    assert!(folder.place().is_ok());
}

#[test]
fn the_file_is_removed_with_its_last_process() {
    let folder = Folder::new();
    let search = folder.search();
    let name = "xrcd-soft0-rdm-0000000000000000";
    let first = found(&search);
    let second = found(&search);
    assert_eq!(first.identity(), second.identity());
    let file = folder.0.join("weft").join(name);
    let metadata = std::fs::metadata(&file).unwrap();
    assert_eq!(metadata.mode() & 0o777, 0o600);
    drop(first);
    assert_eq!(folder.names(), [name]);
    drop(second);
    assert!(folder.names().is_empty());
}

/// A forked child has the descriptor and its lock, which is also that of its parent.
#[test]
fn a_child_that_drops_the_file_changes_nothing() {
    let folder = Folder::new();
    let file = found(&folder.search());
    let names = folder.names();
    // SAFETY: the child drops its copy, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(file);
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: `status` is writable.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(folder.names(), names);
    let other = calls::open_file(file.directory.as_fd(), &file.name, true).unwrap();
    assert!(!calls::try_lock(&other, true).unwrap(), "the lock is held");
    assert!(calls::try_lock(&other, false).unwrap(), "shared");
}

#[test]
fn endpoints_keys_and_devices_have_files_of_their_own() {
    let folder = Folder::new();
    let search = folder.search();
    let others = [
        Search {
            endpoints: Endpoints::Msg,
            ..search.clone()
        },
        Search {
            auth: 0xabc,
            ..search.clone()
        },
        Search {
            device: "mlx5_0",
            ..search.clone()
        },
    ];
    let own = found(&search);
    let all: Vec<_> = others.iter().map(found).collect();
    assert!(all.iter().all(|file| file.identity() != own.identity()));
    let names = [
        "xrcd-mlx5_0-rdm-0000000000000000",
        "xrcd-soft0-msg-0000000000000000",
        "xrcd-soft0-rdm-0000000000000000",
        "xrcd-soft0-rdm-0000000000000abc",
    ];
    assert_eq!(folder.names(), names);
}

#[test]
fn files_of_ended_processes_are_removed_by_the_next_one() {
    let folder = Folder::new();
    let search = folder.search();
    let used = found(&Search {
        auth: 1,
        ..search.clone()
    });
    let weft = folder.0.join("weft");
    // the kernel has released the locks of these
    std::fs::write(weft.join("xrcd-soft0-rdm-0000000000000002"), "").unwrap();
    std::fs::write(weft.join("notes"), "").unwrap();
    std::fs::write(weft.join("xrcd-notes"), "of the user").unwrap();
    let own = found(&search);
    let names = [
        "notes",
        "xrcd-notes",
        "xrcd-soft0-rdm-0000000000000000",
        "xrcd-soft0-rdm-0000000000000001",
    ];
    assert_eq!(folder.names(), names);
    drop((used, own));
    assert_eq!(folder.names(), ["notes", "xrcd-notes"]);
}

#[test]
fn a_lock_that_is_not_released_delays_one_second() {
    let folder = Folder::new();
    let directory = folder.open();
    let file = calls::open_file(directory.as_fd(), NAME, true).unwrap();
    assert!(calls::try_lock(&file, true).unwrap());
    let begin = Instant::now();
    let refused = open_in(directory, NAME);
    assert!(matches!(refused, Err(Refused::Failed(_))));
    assert!(begin.elapsed() >= FILE_LOCK_WAIT);
    drop(file);
    assert!(open_in(folder.open(), NAME).is_ok());
}

#[test]
fn a_demanded_path_is_used_or_refused() {
    let folder = Folder::new();
    let path = folder.0.join("mine");
    let search = Search {
        demanded: Some(&path),
        ..folder.search()
    };
    let file = found(&search);
    let metadata = std::fs::metadata(folder.0.join("mine.rdm")).unwrap();
    assert_eq!(file.identity(), (metadata.dev(), metadata.ino()));
    set_mode(&folder.0.join("mine.rdm"), 0o644);
    assert_eq!(find(&search).err(), Some(FiErrno::EACCES));
    drop(file);
    // a directory in which others can replace the file, and one in which they cannot
    set_mode(&folder.0, 0o777);
    assert_eq!(find(&search).err(), Some(FiErrno::EACCES));
    set_mode(&folder.0, 0o1777);
    assert!(find(&search).is_ok());
    set_mode(&folder.0, 0o700);
    // a directory that does not exist leads to the next place
    let missing = folder.0.join("missing/mine");
    let search = Search {
        demanded: Some(&missing),
        ..folder.search()
    };
    drop(found(&search));
    assert!(folder.0.join("weft").exists());
}

#[test]
fn places_are_those_of_the_user() {
    let user = calls::user();
    let paths: Vec<_> = places(Some(Path::new("/a/b")))
        .iter()
        .map(|place| (place.base.join(place.leaf.to_str()), place.own))
        .collect();
    let expected = [
        ("/a/b/weft".into(), true),
        (format!("/run/user/{user}/weft"), true),
        (format!("/dev/shm/weft-{user}"), false),
    ];
    assert_eq!(
        paths,
        expected.map(|(path, own)| (PathBuf::from(path), own))
    );
    assert_eq!(places(None).len(), 2);
}

fn open(device: &Arc<Device>, file: &DomainFile) -> Arc<Xrcd> {
    Arc::new(Xrcd::open(device, Some(file.as_fd()), libc::O_CREAT).unwrap())
}

#[test]
fn domains_of_one_file_are_one_node() {
    let device = devices(&[softverbs::backend()], false).remove(0);
    let folder = Folder::new();
    let search = folder.search();
    let (first, second) = (found(&search), found(&search));
    let node = NodeId::of_file(&device, 0, first.as_fd()).unwrap();
    assert_eq!(NodeId::of_file(&device, 0, second.as_fd()).unwrap(), node);
    assert_ne!(NodeId::of_file(&device, 1, second.as_fd()).unwrap(), node);
    let other = found(&Search { auth: 1, ..search });
    assert_ne!(NodeId::of_file(&device, 0, other.as_fd()).unwrap(), node);
    let domains = [&first, &second, &other].map(|file| open(&device, file));
    let target = Target::create(&domains[0]).unwrap();
    let number: QpNumber = target.number();
    assert!(Target::open(&domains[1], number).is_ok());
    assert!(Target::open(&domains[2], number).is_err());
}
