//! Slices beside inaccessible pages: an access outside of them ends the process.

use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut, slice_from_raw_parts_mut};

/// The end of a slice that is beside an inaccessible page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    Start,
    End,
}

/// A slice in pages of its own, between two inaccessible pages.
pub struct Guarded<T: Copy> {
    mapping: NonNull<[u8]>,
    values: NonNull<[T]>,
}

impl<T: Copy> Guarded<T> {
    pub fn new(values: &[T], side: Side) -> Self {
        let bytes = size_of_val(values);
        // SAFETY: a new mapping, whose inner pages become accessible; the values fit them, at an aligned address,
        // because a page is a multiple of every alignment and `bytes` one of that of `T`.
        unsafe {
            let page = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap();
            let inner = bytes.next_multiple_of(page);
            let (total, flags) = (inner + 2 * page, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let mapping = libc::mmap(null_mut(), total, libc::PROT_NONE, flags, -1, 0);
            assert!(mapping != libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            let mapping = mapping.cast::<u8>();
            if inner > 0 {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                assert_eq!(libc::mprotect(mapping.add(page).cast(), inner, access), 0);
            }
            let start = if side == Side::Start { page } else { page + inner - bytes };
            let at = mapping.add(start).cast::<T>();
            at.copy_from_nonoverlapping(values.as_ptr(), values.len());
            Self {
                mapping: NonNull::new(slice_from_raw_parts_mut(mapping, total)).unwrap(),
                values: NonNull::new(slice_from_raw_parts_mut(at, values.len())).unwrap(),
            }
        }
    }
}

impl<T: Copy> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing else refers to.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapping.len()) };
    }
}

impl<T: Copy> Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: initialised by `new`.
        unsafe { self.values.as_ref() }
    }
}

impl<T: Copy> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: initialised by `new`.
        unsafe { self.values.as_mut() }
    }
}
