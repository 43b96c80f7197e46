//! Libraries that are not NVRTC. `tests/test_cuda_kernels.py` compiles with the real one.

use std::fs;
use std::path::PathBuf;

use penstock_cuda::{NotFound, Nvrtc, NvrtcError, Search, Sources, Version};

fn reason(library: &str) -> String {
    let search = Search { library: Some(PathBuf::from(library)), ..Search::default() };
    match Nvrtc::find(&search) {
        Err(NvrtcError::NotFound(NotFound(tried))) if tried.len() == 1 => tried[0].1.clone(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{library} was accepted"),
    }
}

#[test]
fn library_that_does_not_exist_is_an_error() {
    assert!(reason("/nonexistent/libnvrtc.so").contains("No such file"));
}

#[test]
fn file_that_is_no_library_is_an_error() {
    let path = std::env::temp_dir().join(format!("penstock-nvrtc-{}.so", std::process::id()));
    fs::write(&path, "text").expect("a file");
    let reason = reason(path.to_str().expect("a path"));
    fs::remove_file(&path).expect("a file");
    assert!(reason.contains("file too short") || reason.contains("invalid ELF header"), "{reason}");
}

#[test]
#[cfg(target_os = "linux")]
fn another_library_is_an_error() {
    assert_eq!(reason("libc.so.6"), "it has no function nvrtcVersion");
}

#[test]
fn error_lists_what_was_tried_and_the_package() {
    let search = Search {
        library: Some(PathBuf::from("/a/b.so")),
        driver: Some(Version::new(13, 0)),
        ..Search::default()
    };
    let error = Nvrtc::find(&search).err().expect("an error").to_string();
    assert!(error.starts_with("NVRTC is not available: /a/b.so ("), "{error}");
    assert!(error.contains("install the package nvidia-cuda-nvrtc"), "{error}");
}

#[test]
fn embedded_sources_are_those_of_the_folder() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../cuda");
    let sources = Sources::embedded();
    assert_eq!(sources, Sources::read(folder.as_ref()).expect("a folder"));
    assert!(sources.headers().iter().any(|(name, _)| name == "common.cuh"));
    assert!(sources.names().all(|name| name.ends_with(".cu") && sources.get(name).is_some()));
    assert_eq!(sources.get("missing.cu"), None);
}
