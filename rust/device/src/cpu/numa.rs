//! The NUMA nodes of the machine, and the placement of threads and memory on some of them.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use penstock_kernels::{allowed_cpus, panels_of_node};

use super::PAGE;
use crate::arena::HostSlab;
use crate::system::parse_kilobytes;

/// The directory with `node` and `cpu`.
const SYSTEM: &str = "/sys/devices/system";

/// A NUMA node with CPUs that the process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// The number of the node.
    pub id: usize,
    /// The CPUs that the process may use.
    pub cpus: Vec<usize>,
    /// The number of physical cores of these CPUs.
    pub cores: usize,
}

/// A node cannot be used. The text completes "it must be ...".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NumaError(String);

/// The nodes with these ids, in their order.
pub fn numa_nodes(ids: &[usize]) -> Result<Vec<NumaNode>, NumaError> {
    let allowed = allowed_cpus().map_err(|error| NumaError(format!("left out: {error}")))?;
    read_nodes(Path::new(SYSTEM), ids, &allowed)
}

fn read_nodes(system: &Path, ids: &[usize], allowed: &[usize]) -> Result<Vec<NumaNode>, NumaError> {
    let list = |path: String| parse_list(&fs::read_to_string(system.join(path)).ok()?);
    let online = list("node/online".to_owned());
    let online = online.ok_or_else(|| {
        NumaError(format!("left out: {}/node has no NUMA nodes on this system", system.display()))
    })?;
    let node = |id: &usize| {
        let all = online.contains(id).then(|| list(format!("node/node{id}/cpulist"))).flatten();
        let unknown = || {
            let online = joined(&online);
            NumaError(format!("NUMA nodes of this machine: {online}; node {id} does not exist"))
        };
        let cpus: Vec<_> = all.ok_or_else(unknown)?.into_iter().filter(|cpu| allowed.contains(cpu)).collect();
        if cpus.is_empty() {
            let allowed = ranges(allowed);
            return Err(NumaError(format!(
                "nodes with CPUs that the process may use ({allowed}); node {id} has none"
            )));
        }
        // A core is named by its first CPU.
        let core = |cpu: &usize| {
            let siblings = list(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
            siblings.and_then(|siblings| siblings.first().copied()).unwrap_or(*cpu)
        };
        let mut cores: Vec<_> = cpus.iter().map(core).collect();
        cores.sort_unstable();
        cores.dedup();
        Ok(NumaNode { id: *id, cores: cores.len(), cpus })
    };
    ids.iter().map(node).collect()
}

/// The numbers of a list such as `0-3,8,10-11`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse().ok()?, last.parse::<u16>().ok()?);
        numbers.extend((first..=last).map(usize::from));
    }
    Some(numbers)
}

fn joined(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Ascending numbers in the form that [`parse_list`] reads.
fn ranges(numbers: &[usize]) -> String {
    let ranges = numbers.chunk_by(|number, next| number + 1 == *next).map(|range| match range {
        [first, .., last] => format!("{first}-{last}"),
        _ => joined(range),
    });
    ranges.collect::<Vec<_>>().join(",")
}

/// Sets the nodes of memory, as [`penstock_kernels::place`] does.
type Place = fn(&mut [u8], &[usize]) -> io::Result<()>;

/// The nodes on which memory is placed.
#[derive(Debug)]
pub(super) struct NumaMemory {
    /// Empty if memory is not placed.
    ids: Vec<usize>,
    place: Place,
    /// The reason why memory is not placed.
    error: Option<io::Error>,
}

impl NumaMemory {
    /// The nodes with these ids. If the system refuses one of them, memory is not placed.
    pub(super) fn new(ids: Vec<usize>, place: Place) -> Self {
        let probe = |ids: &[usize]| match HostSlab::reserve(PAGE) {
            Ok(mut page) => place(page.as_mut(), ids).err(),
            Err(error) => Some(io::Error::other(error.reason)),
        };
        // The system ignores the refused ones of several nodes, so each is tried alone.
        let error = ids.chunks(1).find_map(probe);
        Self { ids: if error.is_none() { ids } else { Vec::new() }, place, error }
    }

    /// Whether memory is placed.
    pub(super) fn is_set(&self) -> bool {
        !self.ids.is_empty()
    }

    /// The reason why memory is not placed, though there are nodes.
    pub(super) fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// Sets the policy of `bytes` before they are written: one node is preferred, several are interleaved.
    pub(super) fn place(&self, bytes: &mut [u8]) {
        if self.is_set() {
            let _ = (self.place)(bytes, &self.ids); // the system accepted the nodes before
        }
    }

    /// Sets the nodes of a matrix: the panels that a node computes are in its memory. `offset_of` is the first byte of
    /// a panel; that of `panels` is the end.
    pub(super) fn place_panels(&self, bytes: &mut [u8], panels: usize, offset_of: impl Fn(usize) -> usize) {
        if self.ids.len() < 2 {
            return; // the policy of the arena applies
        }
        for (index, id) in self.ids.iter().enumerate() {
            let Range { start, end } = panels_of_node(panels, self.ids.len(), index);
            let bytes = &mut bytes[offset_of(start)..offset_of(end)];
            let _ = (self.place)(bytes, &[*id]); // after a failure, the policy of the arena applies
        }
    }

    /// Bytes of the nodes that are available: free, or files that can be dropped. `None` if memory is not placed.
    pub(super) fn available(&self) -> Option<u64> {
        let bytes = |id: &usize| {
            let path = format!("{SYSTEM}/node/node{id}/meminfo");
            parse_available(&fs::read_to_string(path).ok()?)
        };
        if self.is_set() { self.ids.iter().map(bytes).sum() } else { None }
    }
}

/// The available bytes of a node's `meminfo`. Lines begin with `Node 0 `.
fn parse_available(meminfo: &str) -> Option<u64> {
    let lines = || meminfo.lines().filter_map(|line| line.trim().splitn(3, ' ').nth(2));
    let bytes = |name: &str| lines().find_map(|line| parse_kilobytes(line, name));
    Some(bytes("MemFree:")? + bytes("Active(file):").unwrap_or(0) + bytes("Inactive(file):").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::PathBuf;

    use penstock_kernels::PANEL_ROWS;
    use penstock_types::Dtype;

    use super::*;
    use crate::cpu::Cpu;
    use crate::cpu::buffers::lend_some;
    use crate::seam::{Load, MatrixPart, Memory, RowSource, WeightSource};

    /// A machine: two nodes with cores of two CPUs each, CPU 3 offline; node 2 has only memory, node 3 is offline.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("penstock-numa-{name}-{}", std::process::id()));
            let write = |path: String, text: &str| {
                let path = root.join(path);
                fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
                fs::write(path, text).expect("a file");
            };
            write("node/online".to_owned(), "0,2,5\n");
            for (node, cpus) in [(0, "0-2,8-10\n"), (2, "\n"), (5, "4-7,12-15\n")] {
                write(format!("node/node{node}/cpulist"), cpus);
            }
            for cpu in [0, 1, 2, 4, 5, 6, 7] {
                for id in [cpu, cpu + 8] {
                    let siblings = format!("{cpu},{}\n", cpu + 8);
                    write(format!("cpu/cpu{id}/topology/thread_siblings_list"), &siblings);
                }
            }
            Self(root)
        }

        fn read(&self, ids: &[usize], allowed: &[usize]) -> Result<Vec<NumaNode>, String> {
            read_nodes(&self.0, ids, allowed).map_err(|error| error.to_string())
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn nodes_have_the_allowed_cpus_and_their_cores() {
        let machine = Machine::new("cores");
        let all: Vec<usize> = (0..16).collect();
        let node = |id, cpus: &[usize], cores| NumaNode { id, cpus: cpus.to_vec(), cores };
        let expected = vec![node(5, &[4, 5, 6, 7, 12, 13, 14, 15], 4), node(0, &[0, 1, 2, 8, 9, 10], 3)];
        assert_eq!(machine.read(&[5, 0], &all), Ok(expected));
        // The second CPU of a core without the first is a core, too.
        assert_eq!(machine.read(&[0], &[1, 8, 9, 12]), Ok(vec![node(0, &[1, 8, 9], 2)]));
    }

    #[test]
    fn unusable_node_error_names_the_usable_ones() {
        let machine = Machine::new("errors");
        let all: Vec<usize> = (0..16).collect();
        for id in [1, 3, 1023] {
            let expected = format!("NUMA nodes of this machine: 0, 2, 5; node {id} does not exist");
            assert_eq!(machine.read(&[0, id], &all), Err(expected));
        }
        let error = machine.read(&[2], &[0, 1, 2, 4]).expect_err("only memory");
        assert_eq!(error, "nodes with CPUs that the process may use (0-2,4); node 2 has none");
        let error = machine.read(&[0, 5], &[0, 8]).expect_err("no allowed CPU");
        assert_eq!(error, "nodes with CPUs that the process may use (0,8); node 5 has none");
        let error = read_nodes(&machine.0.join("missing"), &[0], &all).expect_err("no information");
        assert!(error.to_string().ends_with("missing/node has no NUMA nodes on this system"), "{error}");
    }

    #[test]
    fn list_of_cpus_may_have_gaps() {
        assert_eq!(parse_list("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!((parse_list("\n"), parse_list("0-x")), (Some(vec![]), None));
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }

    #[test]
    fn available_memory_of_a_node_counts_cached_files() {
        let meminfo = "Node 0 MemTotal:  99 kB\nNode 0 MemFree:   10 kB\nNode 0 Active(file):  2 kB\n\
                       Node 0 Inactive(file):    3 kB\n";
        assert_eq!(parse_available(meminfo), Some(15 << 10));
        assert_eq!(parse_available("Node 0 MemTotal: 9 kB\n"), None);
    }

    thread_local! {
        /// The addresses, lengths and nodes of the calls of `record`.
        static CALLS: RefCell<Vec<(usize, usize, Vec<usize>)>> = const { RefCell::new(Vec::new()) };
    }

    /// A system with the nodes 4 and 7.
    fn record(bytes: &mut [u8], nodes: &[usize]) -> io::Result<()> {
        CALLS.with_borrow_mut(|calls| calls.push((bytes.as_ptr().addr(), bytes.len(), nodes.to_vec())));
        if nodes.iter().all(|node| [4, 7].contains(node)) {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    #[test]
    fn refused_node_means_that_no_memory_is_placed() {
        for ids in [vec![5], vec![4, 5], vec![5, 7], vec![]] {
            let memory = NumaMemory::new(ids.clone(), record);
            let shown = (memory.is_set(), memory.available(), memory.error().is_some());
            assert_eq!(shown, (false, None, !ids.is_empty()), "{ids:?}");
            CALLS.take();
            memory.place(&mut [0; 8]);
            memory.place_panels(&mut [0; 8], 8, |panel| panel);
            assert!(CALLS.take().is_empty());
        }
        assert!(NumaMemory::new(vec![4, 7], record).is_set());
    }

    /// Zeroed rows of 64 columns.
    struct Zeros(usize);

    impl RowSource for Zeros {
        fn rows(&self) -> usize {
            self.0
        }

        fn columns(&self) -> usize {
            64
        }

        fn read(&self, _: Range<usize>, out: &mut [f32]) {
            out.fill(0.0);
        }
    }

    impl WeightSource for Zeros {}

    #[test]
    fn panels_of_a_matrix_are_placed_on_their_nodes() {
        const ROWS: usize = PANEL_ROWS;
        let parts = [(Zeros(3 * ROWS), Dtype::Bf16), (Zeros(4 * ROWS), Dtype::F32)];
        let parts = [0, 1].map(|i| MatrixPart { source: &parts[i].0, format: parts[i].1.into() });
        for ids in [vec![4], vec![7, 4]] {
            let mut cpu = Cpu::new(1).expect("a thread");
            cpu.numa_memory = NumaMemory::new(ids.clone(), record);
            cpu.reserve(1 << 20).expect("memory");
            let (_, len, nodes) = CALLS.take().pop().expect("a call for the arena");
            assert_eq!((len >= 1 << 20, &nodes), (true, &ids));
            let matrix = cpu.load_matrix(&parts).expect("a matrix");
            let [bytes] = lend_some(&mut cpu.arena, [matrix.weights.region()]);
            let start = bytes.as_ptr().addr();
            let calls: Vec<_> =
                CALLS.take().into_iter().map(|(at, len, ids)| (at - start, len, ids)).collect();
            // The first node has 3 of 7 panels: those of the first part.
            let (first, second) = (3 * ROWS * 64 * 2, 4 * ROWS * 64 * 4);
            let expected = vec![(0, first, vec![7]), (first, second, vec![4])];
            assert_eq!(calls, if ids.len() == 2 { expected } else { Vec::new() });
            // Panels of both parts.
            let panels = [1, 2].map(|count| count * ROWS * 64 * 2).into_iter();
            let others = [1, 2, 3, 4].map(|count| first + count * ROWS * 64 * 4);
            let offsets: Vec<_> = [0].into_iter().chain(panels).chain([first]).chain(others).collect();
            assert_eq!(
                (0..=matrix.panels()).map(|panel| matrix.panel_offset(panel)).collect::<Vec<_>>(),
                offsets
            );
        }
    }
}
