//! Benches that print what an adapter costs against its floor.
