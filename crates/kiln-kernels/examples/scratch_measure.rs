use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_kernels::{Choice, Kernels};
use rayon::prelude::*;
use std::time::Instant;

fn best(mut f: impl FnMut(), reps: usize) -> f64 {
    let mut b = f64::INFINITY;
    for _ in 0..reps {
        let t = Instant::now();
        f();
        b = b.min(t.elapsed().as_secs_f64());
    }
    b
}

fn read_bandwidth(n: usize, reps: usize) -> f64 {
    let data = vec![1.0f32; n];
    let chunk = n.div_ceil(rayon::current_num_threads() * 4);
    let sum = |c: &[f32]| {
        let mut s = [0.0f32; 64];
        for b in c.chunks_exact(64) {
            s.iter_mut().zip(b).for_each(|(s, x)| *s += x);
        }
        s.iter().sum::<f32>()
    };
    let t = best(|| { std::hint::black_box(data.par_chunks(chunk).map(sum).sum::<f32>()); }, reps);
    (n * 4) as f64 / t / 1e9
}

fn main() {
    let threads: usize = std::env::args().nth(1).map_or(2, |s| s.parse().unwrap());
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().unwrap();
    println!("threads {threads}");
    for mb in [1usize, 11, 128, 512] {
        println!("read {mb} MiB: {:.1} GB/s", read_bandwidth(mb << 18, 40));
    }
    let d = Device::flex();
    let auto = Kernels::new(Choice::Auto, &d).unwrap();
    let def = Kernels::new(Choice::Definition, &d).unwrap();
    let rnd3 = |s: [usize; 3]| Tensor::<3>::random(s, Distribution::Normal(0.0, 1.0), (&d, DType::F32));
    for (out, input) in [(2816, 1024), (1024, 2816), (32000, 1024), (1024, 32000), (1024,1024), (640, 256), (512,512), (256, 256), (128, 256), (64, 256), (64,64)] {
        // As many copies as it takes not to fit in the cache, used in turn.
        let bytes = out * input * 4;
        for cold in [false, true] {
            let copies = if cold { (200usize << 20).div_ceil(bytes).max(2).min(400) } else { 1 };
            let ws: Vec<_> = (0..copies).map(|_| Tensor::<2>::random([out, input], Distribution::Normal(0.0, 1.0), (&d, DType::F32))).collect();
            let mut line = format!("{input}->{out} {:.2} MB {}:", bytes as f64 / 1e6, if cold { "cold" } else { "hot " });
            for rows in [1, 4] {
                let x = rnd3([1, rows, input]);
                for (name, k) in [("native", &auto), ("definition", &def)] {
                    if name == "definition" && bytes > 20 << 20 && cold { continue; }
                    let mut i = 0;
                    let per = 1000usize.min((2000usize << 20) / bytes).max(8);
                    let t = best(|| { std::hint::black_box(k.linear(x.clone(), ws[i % copies].clone(), None)); i += 1; }, per);
                    line += &format!("  {name} x{rows} {:.1} us {:.1} GB/s", t * 1e6, bytes as f64 / t / 1e9);
                }
            }
            println!("{line}");
        }
    }
    for (m, k, n) in [(256, 1024, 2816), (256, 2816, 1024), (5, 1024, 2816), (16, 1024, 2816)] {
        let x = rnd3([1, m, k]);
        let w = Tensor::<2>::random([n, k], Distribution::Normal(0.0, 1.0), (&d, DType::F32));
        let t = best(|| { std::hint::black_box(auto.linear(x.clone(), w.clone(), None)); }, 20);
        let t3 = best(|| { std::hint::black_box(x.clone().matmul(w.clone().transpose().unsqueeze())); }, 20);
        println!("gemm {m}x{k}x{n}: {:.1} GFLOP/s (3-D matmul {:.1})", 2.0 * (m * k * n) as f64 / t / 1e9, 2.0 * (m * k * n) as f64 / t3 / 1e9);
    }
}
