//! [`Observer`]: functions of an emulated driver, which checks the program. No other driver has them.

use std::ffi::{c_int, c_ulonglong};

use cudarc::driver::sys;

use crate::table::Address;

/// The functions.
#[derive(Debug)]
pub struct Observer {
    arm: unsafe extern "C" fn(c_int),
    region: unsafe extern "C" fn(c_ulonglong, c_ulonglong, c_int, sys::CUstream),
}

impl Observer {
    pub(crate) fn load(find: impl Fn(&[u8]) -> Option<Address>) -> Option<Self> {
        let (arm, region) = (find(b"emuArm\0")?, find(b"emuRegion\0")?);
        // SAFETY: only the emulated driver has functions of these names, and they have these signatures.
        unsafe {
            Some(Self {
                arm: std::mem::transmute::<Address, unsafe extern "C" fn(c_int)>(arm),
                region: std::mem::transmute::<
                    Address,
                    unsafe extern "C" fn(c_ulonglong, c_ulonglong, c_int, sys::CUstream),
                >(region),
            })
        }
    }

    /// Begins or ends a step. In a step, allocations and synchronisation are defects.
    pub fn arm(&self, is_armed: bool) {
        // SAFETY: the function takes any number.
        unsafe { (self.arm)(is_armed.into()) };
    }

    /// See [`Stream::report_region`](crate::Stream::report_region).
    ///
    /// # Safety
    ///
    /// The stream is alive.
    pub(crate) unsafe fn region(&self, address: u64, bytes: usize, is_live: bool, stream: sys::CUstream) {
        // SAFETY: the caller's; the function reads no memory.
        unsafe { (self.region)(address, bytes as c_ulonglong, is_live.into(), stream) };
    }
}
