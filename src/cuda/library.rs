//! A shared library that is loaded if it is there: NCCL's, and the one that watches the GPUs.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;

/// A loaded library, which stays for as long as the process lives: such libraries keep threads.
pub(super) struct Library(*mut c_void);

impl Library {
    /// Loads the library of this name, or of this path; else why not, in the loader's words.
    pub(super) fn load(name: &OsStr) -> Result<Self, String> {
        let path = CString::new(name.as_bytes()).map_err(|_| "its name has a NUL".to_owned())?;
        // SAFETY: the name ends in NUL; what runs as it loads is the code that the user or the system
        // has put there.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(loader_error()) } else { Ok(Self(handle)) }
    }

    /// The function of this name; else why not, in the loader's words.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is loaded, and the name ends in NUL.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            return Err(loader_error());
        }
        // SAFETY: the address is that of a function of type `F`, which has the size of an address.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}

/// What the loader says of its last failure on this thread.
fn loader_error() -> String {
    // SAFETY: the text is this thread's until its next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: as above; it ends in NUL.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_said_and_what_is_there_can_be_called() {
        assert!(Library::load(OsStr::new("libtalon-has-none.so")).is_err());
        assert!(Library::load(OsStr::new("a\0b")).is_err());
        let library = Library::load(OsStr::new("libc.so.6")).expect("libc is loaded anyway");
        type Labs = unsafe extern "C" fn(i64) -> i64;
        // SAFETY: labs takes and gives a long, which is 64 bits here.
        let labs = unsafe { library.function::<Labs>(c"labs") }.expect("libc has it");
        // SAFETY: as above.
        assert_eq!(unsafe { labs(-3) }, 3);
        // SAFETY: nothing is found, so nothing is called.
        assert!(unsafe { library.function::<Labs>(c"talon_has_none") }.is_err());
    }
}
