//! Tables of the functions of a library. A result is an `i32`: a newer library may return codes that an enum of today does
//! not have, which would be undefined behaviour.

/// A function of any type.
pub(crate) type Address = unsafe extern "C" fn();

/// Declares a table: for each function a method, its name in the library and its arguments.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($method:ident = $name:literal($($argument:ident: $kind:ty),*);)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $($method: unsafe extern "C" fn($($kind),*) -> $crate::library::Status,)*
        }

        impl $table {
            /// Looks the functions up. The error is the name of one that is missing.
            ///
            /// # Safety
            ///
            /// `find` returns the driver's function of a name, which ends with a null character, and the library is
            /// never unloaded.
            unsafe fn load(
                find: impl Fn(&[u8]) -> Option<$crate::table::Address>,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    $($method: {
                        let found = find(concat!($name, "\0").as_bytes()).ok_or($name)?;
                        // SAFETY: the driver's function of this name has this signature in every version of CUDA.
                        unsafe {
                            std::mem::transmute::<
                                $crate::table::Address,
                                unsafe extern "C" fn($($kind),*) -> $crate::library::Status,
                            >(found)
                        }
                    },)*
                })
            }

            $(
                /// # Safety
                ///
                /// The pointers are valid and the handles alive.
                pub(crate) unsafe fn $method(&self, $($argument: $kind),*) -> Result<(), $crate::error::CallError> {
                    // SAFETY: the caller's.
                    $crate::error::CallError::check($name, unsafe { (self.$method)($($argument),*) })
                }
            )*
        }
    };
}
pub(crate) use functions;
