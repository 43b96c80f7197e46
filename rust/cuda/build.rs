//! Writes the list of the files in `cuda/`, which the crate embeds.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let variable = |name| PathBuf::from(env::var_os(name).expect("Cargo sets the variable"));
    let folder = variable("CARGO_MANIFEST_DIR").join("../../cuda").canonicalize()?;
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut paths: Vec<_> = fs::read_dir(&folder)?.map(|file| Ok(file?.path())).collect::<io::Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"));
    paths.sort();
    let mut list = "&[\n".to_owned();
    for path in paths {
        let name = path.file_name().expect("a file of a folder has a name");
        writeln!(list, "    ({name:?}, include_str!({path:?})),").expect("a string takes all text");
    }
    list.push(']');
    fs::write(variable("OUT_DIR").join("sources.rs"), list)
}
