//! Memory on NUMA nodes: its policy, and the bits of products.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::ops::Range;

use bytes::Bytes;
use penstock_device::cpu::{Cpu, CpuMatrix, NumaNode};
use penstock_device::{Backend, MatrixPart, RowSource, WeightSource};
use penstock_types::{Dtype, Epilogue};

const COLUMNS: usize = 640;
const ROWS: [usize; 2] = [700, 330];

struct Table(usize);

impl RowSource for Table {
    fn rows(&self) -> usize {
        self.0
    }

    fn columns(&self) -> usize {
        COLUMNS
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(COLUMNS)) {
            out.iter_mut().enumerate().for_each(|(column, x)| *x = ((row * 31 + column * 7) as f32).sin());
        }
    }
}

impl WeightSource for Table {}

/// Nodes with the memory of node 0, on the first and the last CPU.
fn fake_nodes(count: usize) -> Vec<NumaNode> {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let ends = [cpus.split([',', '-']).next(), cpus.rsplit([',', '-']).next()];
    let ends = ends.map(|cpu| cpu.unwrap().parse().unwrap());
    (0..count).map(|node| NumaNode { id: 0, cpus: vec![ends[node % 2]], cores: 1 }).collect()
}

/// The product of a matrix and two rows; `load` makes the matrix.
fn product(mut cpu: Cpu, load: impl FnOnce(&mut Cpu) -> CpuMatrix) -> Vec<f32> {
    cpu.reserve(1 << 23).unwrap();
    let matrix = load(&mut cpu);
    let (rows, norm) = (2, cpu.load_vector(&[1.0; COLUMNS]).unwrap());
    let x: Vec<f32> = (0..rows * COLUMNS).map(|i| (i as f32).cos()).collect();
    let x = cpu.load_vector(&x).unwrap();
    let mut operand = cpu.allocate_operand(rows, COLUMNS).unwrap();
    cpu.rms_norm_for(&matrix, rows, &x, &norm, 1.0, &mut operand).unwrap();
    let mut out = cpu.allocate(rows * ROWS.iter().sum::<usize>()).unwrap();
    cpu.linear(0..rows, &operand, &matrix, Epilogue::Store, &mut out).unwrap();
    let mut values = vec![0.0; rows * ROWS.iter().sum::<usize>()];
    cpu.download(&out, 0, &mut values).unwrap();
    values
}

/// The kernel's policy of each mapping of this process with pages in memory.
fn policies() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let used = maps.lines().filter(|line| line.contains(" anon="));
    used.filter_map(|line| line.split(' ').nth(1).map(str::to_owned)).collect()
}

fn load(cpu: &mut Cpu) -> CpuMatrix {
    let tables = ROWS.map(Table);
    let formats = [Dtype::Bf16, Dtype::F32];
    let parts = [0, 1].map(|i| MatrixPart { source: &tables[i], format: formats[i].into() });
    cpu.load_matrix(&parts).unwrap()
}

#[test]
fn panels_of_a_matrix_are_in_the_memory_of_their_nodes() {
    let expected = product(Cpu::new(2).unwrap(), load);
    assert!(expected.iter().any(|x| x.abs() > 1.0));
    for (nodes, weights, others) in [(1, "prefer:0", "prefer:0"), (2, "prefer:0", "interleave:0")] {
        let cpu = Cpu::open(2, "", &fake_nodes(nodes)).unwrap();
        assert_eq!((cpu.pin_error(), cpu.place_error()), (None, None));
        let mut found = Vec::new();
        let loaded = |cpu: &mut Cpu| {
            let matrix = load(cpu);
            found = policies();
            matrix
        };
        assert_eq!(product(cpu, loaded), expected, "{nodes} nodes");
        assert!(found.iter().any(|policy| policy == weights), "{found:?}");
        let mut cpu = Cpu::open(2, "", &fake_nodes(nodes)).unwrap();
        cpu.reserve(1 << 20).unwrap();
        let _vector = cpu.load_vector(&[1.0; 10_000]).unwrap();
        assert!(policies().iter().any(|policy| policy == others));
    }
}

#[test]
fn mapped_matrix_is_copied_to_its_nodes() {
    let formats = [Dtype::Bf16, Dtype::F32];
    let sizes = [0, 1].map(|i| (ROWS[i], formats[i].into()));
    let mut packer = Cpu::new(1).unwrap();
    assert!(!packer.copies_mapped());
    let mut bytes = Vec::new();
    for (i, (rows, format)) in sizes.into_iter().enumerate() {
        let mut part = vec![0; packer.packed_bytes(COLUMNS, rows, format) as usize];
        packer.pack(MatrixPart { source: &Table(ROWS[i]), format }, &mut part);
        bytes.extend(part);
    }
    let bytes = Bytes::from(bytes);
    let expected =
        product(Cpu::new(2).unwrap(), |cpu| cpu.map_matrix(COLUMNS, &sizes, bytes.clone()).unwrap());
    let placed = |cpu: &mut Cpu| {
        assert!(cpu.copies_mapped());
        let matrix = cpu.map_matrix(COLUMNS, &sizes, bytes.clone()).unwrap();
        assert_eq!(cpu.memory().in_use, cpu.matrix_bytes(COLUMNS, &sizes));
        matrix
    };
    assert_eq!(product(Cpu::open(2, "", &fake_nodes(2)).unwrap(), placed), expected);
    packer.bind_thread(); // without nodes, no effect
}

#[test]
fn memory_of_a_node_that_does_not_exist_is_anywhere() {
    let nodes = [NumaNode { id: 900, ..fake_nodes(1).remove(0) }];
    let cpu = Cpu::open(1, "", &nodes).unwrap();
    assert_eq!((cpu.pin_error(), cpu.place_error().is_some()), (None, true));
    assert_eq!(product(cpu, load), product(Cpu::new(1).unwrap(), load));
}
