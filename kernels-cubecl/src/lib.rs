//! Grouped matrix multiplication over experts: rows sorted by expert, one weight per expert.
