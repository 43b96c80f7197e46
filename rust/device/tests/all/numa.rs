//! Memory on NUMA nodes: the bits of products, and a node that does not exist.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use penstock_device::cpu::{Cpu, CpuMatrix, NumaNode};
use penstock_device::{Allocation, Compute, Load, MatrixPart, Memory, RowSource, WeightSource};
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

/// Nodes with the memory of the first node of the process, on the first and the last CPU.
fn fake_nodes(count: usize) -> Vec<NumaNode> {
    let cpus = penstock_kernels::allowed_cpus().unwrap();
    let ends = [cpus[0], cpus[cpus.len() - 1]];
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let nodes = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    let id = nodes.map_or(0, |nodes| nodes.trim().split([',', '-']).next().unwrap().parse().unwrap());
    (0..count).map(|node| NumaNode { id, cpus: vec![ends[node % 2]], cores: 1 }).collect()
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

fn load(cpu: &mut Cpu) -> CpuMatrix {
    let tables = ROWS.map(Table);
    let formats = [Dtype::Bf16, Dtype::F32];
    let parts = [0, 1].map(|i| MatrixPart { source: &tables[i], format: formats[i].into() });
    cpu.load_matrix(&parts).unwrap()
}

#[test]
fn product_on_nodes_has_the_bits_of_one_without_nodes() {
    let expected = product(Cpu::new(2).unwrap(), load);
    assert!(expected.iter().any(|x| x.abs() > 1.0));
    for nodes in [1, 2] {
        let cpu = Cpu::open(&Arc::default(), 2, "", &fake_nodes(nodes)).unwrap();
        assert_eq!(cpu.pin_error(), None);
        assert_eq!(product(cpu, load), expected, "{nodes} nodes");
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
        // Containers refuse to place memory.
        let is_copied = cpu.place_error().is_none();
        assert_eq!(cpu.copies_mapped(), is_copied);
        let matrix = cpu.map_matrix(COLUMNS, &sizes, bytes.clone()).unwrap();
        let bytes = cpu.bytes(Allocation::Matrix { columns: COLUMNS, parts: &sizes });
        assert_eq!(cpu.memory().in_use, if is_copied { bytes } else { 0 });
        matrix
    };
    assert_eq!(product(Cpu::open(&Arc::default(), 2, "", &fake_nodes(2)).unwrap(), placed), expected);
    packer.bind_thread(); // without nodes, no effect
}

#[test]
fn memory_of_a_node_that_does_not_exist_is_anywhere() {
    for count in [1, 2] {
        let mut nodes = fake_nodes(count);
        nodes[count - 1].id = 900;
        let cpu = Cpu::open(&Arc::default(), count, "", &nodes).unwrap();
        assert_eq!((cpu.pin_error(), cpu.place_error().is_some()), (None, true));
        assert!(!cpu.copies_mapped());
        assert_eq!(product(cpu, load), product(Cpu::new(1).unwrap(), load));
    }
}
