//! The parts of a kernel that make it checkable: its cases, and how it is cut into rows and tokens.

pub(crate) mod case;
pub(crate) mod checked;
pub(crate) mod cut;
pub(crate) mod numbers;
