//! Messages of the Wayland library, which some Vulkan drivers load to look for a display.

use std::ffi::{c_char, c_void};

use libloading::Library;

/// `wl_log_func_t`; the second argument is a `va_list`.
type Handler = extern "C" fn(*const c_char, *mut c_void);

extern "C" fn ignore(_: *const c_char, _: *mut c_void) {}

/// Stops the library from printing that there is no display: a program without windows needs none.
#[expect(unsafe_code, reason = "functions of C")]
pub(crate) fn silence() {
    if cfg!(target_os = "linux") {
        // SAFETY: the hook is as the library documents it, and the handler looks at none of its arguments.
        // The library is never unloaded, so that it does not forget the handler.
        unsafe {
            let Ok(library) = Library::new("libwayland-client.so.0") else { return };
            if let Ok(set) = library.get::<unsafe extern "C" fn(Handler)>(b"wl_log_set_handler_client\0") {
                set(ignore);
            }
            std::mem::forget(library);
        }
    }
}
