//! [`Sources`]: the kernels' texts.

use std::path::Path;
use std::{fs, io};

/// The files of `cuda/`, when this crate was built.
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// The texts of the kernels and of their headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    kernels: Vec<(String, String)>,
    headers: Vec<(String, String)>,
}

impl Sources {
    /// The embedded texts.
    pub fn embedded() -> Self {
        Self::new(EMBEDDED.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())))
    }

    /// The texts of a working copy.
    pub fn read(folder: &Path) -> io::Result<Self> {
        let mut files = Vec::new();
        for entry in folder.read_dir()? {
            let path = entry?.path();
            let is_source = path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh");
            if let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| is_source) {
                files.push((name.to_owned(), fs::read_to_string(&path)?));
            }
        }
        files.sort();
        Ok(Self::new(files.into_iter()))
    }

    fn new(files: impl Iterator<Item = (String, String)>) -> Self {
        let (kernels, headers) = files.partition(|(name, _)| name.ends_with(".cu"));
        Self { kernels, headers }
    }

    /// The names of the kernels' files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|(name, _)| name.as_str())
    }

    /// The text of a kernel's file.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.kernels.iter().find(|(other, _)| other == name).map(|(_, text)| text.as_str())
    }

    /// Names and texts of the headers.
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }
}
