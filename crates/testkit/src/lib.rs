//! Ranks, oracles and tolerances for the tests of the workspace.
