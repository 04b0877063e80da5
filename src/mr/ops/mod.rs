//! What verbs can do with regions beyond `fi_mr(3)`: the provider's `weft_mr_ops`.

mod advise;

pub use advise::AdvisedRange;
