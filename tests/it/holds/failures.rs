//! What happens when servers fail.
