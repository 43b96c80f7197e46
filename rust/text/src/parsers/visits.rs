//! Counts the bytes that the parsers read or copy, so that a test can tell linear from quadratic time.

#[cfg(test)]
thread_local! {
    static VISITED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Records that bytes were read or copied. Does nothing outside tests.
#[inline]
pub(super) fn visit(bytes: usize) {
    #[cfg(test)]
    VISITED.set(VISITED.get() + bytes);
    #[cfg(not(test))]
    let _ = bytes;
}

/// Returns the number of bytes recorded since the last call.
#[cfg(test)]
pub(super) fn take_visits() -> usize {
    VISITED.replace(0)
}
