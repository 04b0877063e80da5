//! The keys of the entries in an endpoint's tables. They are apart from the tables, because an
//! entry of one table names entries of others. [`Core`](super::core::Core) has its own ones. Keys
//! are not reused at once (`slab.rs`), on which late events of circuits rely.

use super::slab::Key;

/// Marks keys of messages and atomics of the send side, and of packets that the engine sends for
/// them.
pub(super) enum TxMark {}
pub(super) type TxKey = Key<TxMark>;

/// Marks keys of operations on remote memory.
pub(super) enum RmaMark {}
pub(super) type RmaKey = Key<RmaMark>;

/// Marks keys of receives.
#[derive(Debug)]
pub(super) enum RxMark {}
pub(super) type RxKey = Key<RxMark>;

/// Marks keys of stored messages.
pub(super) enum StoredMark {}
pub(super) type StoredKey = Key<StoredMark>;

/// Marks keys of messages that arrive after their receives were found.
pub(super) enum ArrivalMark {}
pub(super) type ArrivalKey = Key<ArrivalMark>;

/// Marks keys of READs.
#[derive(Debug)]
pub(super) enum ReadMark {}
pub(super) type ReadKey = Key<ReadMark>;

/// Marks keys of circuits.
pub(super) enum CircuitMark {}
pub(super) type CircuitKey = Key<CircuitMark>;
